"""Where a model's values come from: memory for a part of it, first values, a file.

Also ties: names that are of one parameter, and stay so.
"""

import math
import zlib
from collections import defaultdict

import model as its
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor


def ties(model):
    """Names of each parameter that has several: `to_empty` would make them several."""
    names = defaultdict(list)
    for name, p in model.named_parameters(remove_duplicate=False):
        names[p].append(name)
    return [found for found in names.values() if len(found) > 1]


def tie(model, tied):
    """Let names be names of one parameter again, as far as this rank has them."""
    mine = dict(model.named_parameters(remove_duplicate=False))
    for names in tied:
        first, *others = [name for name in names if name in mine] or [None]
        for name in others:
            module, _, last = name.rpartition(".")
            setattr(model.get_submodule(module), last, mine[first])


def drop(model, name):
    """Take a part out of a model; all others keep their names."""
    parent, _, last = name.rpartition(".")
    module = dict(model.named_modules()).get(parent)
    if not hasattr(module, last):
        raise ValueError(f"FIRST or LAST of model.py has {name}, its model has not")
    setattr(module, last, None)


def allocate(model, tied, args):
    """Memory for this rank's part of a model that has none, and its first values.

    Every rank draws each full parameter by itself, seeded with its name, and keeps its
    part of it: so no message is sent, and all ways to train start alike.

    Args:
        model: on "meta", already divided.
        tied: what `ties` found before it was divided.
        args: options; with `weights`, rank 0 reads a file and sends what is in it.
    """
    model.to_empty(device="cuda")
    tie(model, tied)
    truth = []  # of these, no value says "absent": what stays as it was, is
    for there in (True, False):
        for buffer in model.buffers():
            buffer.fill_(there if buffer.dtype == torch.bool else absent(buffer))
        model.fill_buffers()
        named = model.named_buffers()
        truth.append({n: b.clone() for n, b in named if b.dtype == torch.bool})
    for name, found in truth[0].items():
        if not found.equal(truth[1][name]):
            raise ValueError(f"{name} has no values; does fill_buffers() fill it?")
    if args.weights:
        receive(model, args.weights)
    else:
        known_as = {name: names[0] for names in tied for name in names}
        for name, p in model.named_parameters():
            name = known_as.get(name, name)
            full = torch.empty(p.shape, dtype=p.dtype, device="cuda")
            with torch.random.fork_rng([torch.cuda.current_device()]), torch.no_grad():
                torch.manual_seed(zlib.crc32(name.encode()))
                its.first_value(name, full)
                put(p, full)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if missing(local):
            raise ValueError(f"{name} has no values; does fill_buffers() fill it?")


def absent(tensor):
    """What stands where there is no value yet; truth values have none to spare."""
    if tensor.dtype == torch.bool:
        return False
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    return torch.iinfo(tensor.dtype).max if is_integer else math.nan


def missing(tensor):
    """Whether a tensor has no values; one of floats, whether it lacks some."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    if tensor.dtype == torch.bool:
        return False
    same = tensor == absent(tensor)  # of whole numbers, some may have this value
    return bool(same.any()) and bool(same.all())


def put(tensor, full):
    """Copy a full tensor, or this rank's part of it."""
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        full = distribute_tensor(full, mesh, placements, src_data_rank=None)
    tensor.copy_(full)


@torch.no_grad()
def receive(model, file):
    """Rank 0 reads a full state dict and sends tensor after tensor to the others."""
    alone = not dist.is_initialized()
    values, about = {}, [None]
    if alone or dist.get_rank() == 0:
        found = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        values = {name: v for name, v in found.items() if torch.is_tensor(v)}
        about = [{name: (v.shape, v.dtype) for name, v in values.items()}]
    if not alone:
        dist.broadcast_object_list(about)
    mine = model.state_dict()
    missing = sorted(mine.keys() - about[0].keys())
    if missing:
        raise ValueError(f"{file} has no {', '.join(missing)}")
    for name, (shape, dtype) in about[0].items():
        if name in mine and shape != mine[name].shape:  # copying might repeat it
            here = tuple(mine[name].shape)
            raise ValueError(f"{name}: {tuple(shape)} in {file}, {here} in the model")
        full = torch.empty(shape, dtype=dtype, device="cuda")
        if name in values:
            full.copy_(values[name])
        if not alone:
            dist.broadcast(full, 0)
        if name in mine:
            put(mine[name], full)
