"""Train one model over all GPUs of this machine, from one process.

    python split_model.py --parts 4 [--bf16] [--load split_model.pt]

The model is a list of layers, each called as `layer(x, batch)`. `x` is what the layer
before it has returned: a tensor, or a tuple or dictionary of tensors; None for the
first. `batch` is the batch, a dictionary, on the layer's GPU: there layers find what
several of them read, such as a mask. Layers may share weights, wherever they are.

Measures the memory that each layer needs, and cuts the model so that each GPU, small or
large, fills to about the same share. Trains it in micro-batches, `--parts` of each
batch, saves it, and prints the loss beside that of one GPU, if one can train the model.
With dropout, only the loss before training is the same: each GPU draws its own random
numbers. Used in lesson 13.
"""

import argparse
import copy
import functools
import os
from collections.abc import Mapping

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser(description="Train a model that is split over GPUs.")
parser.add_argument("--parts", type=int, default=4, help="micro-batches of a batch")
parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
parser.add_argument("--load", help="a checkpoint to start from, whatever its cut was")
options = parser.parse_args()
parts = options.parts
gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
if not gpus:
    parser.error("there is no GPU")

# -- your model ------------------------------------------------------------------------
TOKENS, WIDTH, HEADS, BLOCKS = 64, 256, 4, 6


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)

    def forward(self, x, batch):
        return self.embedding(batch["tokens"])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, batch):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3 * HEADS, -1))
        q, k, v = qkv.transpose(1, 2).chunk(3, dim=1)  # (rows, heads, tokens, size)
        y = F.scaled_dot_product_attention(q, k, v, batch["mask"])
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, TOKENS)

    def forward(self, x, batch):
        return self.linear(x)


def make_layers():
    torch.manual_seed(0)
    return nn.ModuleList([Embed(), *(Block() for _ in range(BLOCKS)), Head()])


def sum_of_losses(x, batch):
    """From what the last layer returns; padding, -100, does not count."""
    labels = batch["labels"].flatten()
    return F.cross_entropy(x.float().flatten(0, 1), labels, reduction="sum")


def counted(batch):
    """How many losses that are, of a batch on the CPU."""
    return (batch["labels"] != -100).sum().item()


def make_optimizer(weights):
    return torch.optim.Adam(weights, lr=3e-4, fused=True)


# -- your data: items are dictionaries, all tensors with the samples first -------------
def make_items(number=40, length=16):
    generator = torch.Generator().manual_seed(1)
    start = torch.randint(TOKENS, (number, 1), generator=generator)
    tokens = (start + 5 * torch.arange(length + 1)) % TOKENS
    lengths = torch.randint(length // 2, length + 1, (number,), generator=generator)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    items = []
    for row, used in zip(tokens, lengths, strict=True):
        is_used = torch.arange(length) < used
        labels = row[1:].masked_fill(~is_used, -100)
        mask = (causal & is_used)[None]  # the same for all heads
        items.append({"tokens": row[:-1], "labels": labels, "mask": mask})
    return items


loader = DataLoader(make_items(), batch_size=8)
# --------------------------------------------------------------------------------------


def each(function, value):
    """A function of each tensor in a tuple, list or dictionary, or of the tensor."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: each(function, one) for name, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*[each(function, one) for one in value])
    if isinstance(value, (list, tuple)):
        return type(value)(each(function, one) for one in value)
    return value


def move(value, device):
    return each(lambda tensor: tensor.to(device), value)


def part_of(batch, number, parts):
    """A micro-batch: views of the batch, so nothing is copied."""
    return each(lambda tensor: tensor.tensor_split(parts)[number], batch)


def autocast():
    return torch.autocast("cuda", torch.bfloat16, enabled=options.bf16)


def memory_of(layer, x, batch):
    """Bytes that training needs for one layer, measured, and what it passes on."""
    before = torch.cuda.memory_allocated(gpus[0])
    layer = copy.deepcopy(layer).to(gpus[0])
    with autocast():
        output = layer(x, batch)  # keeps the activations, too
    weights = list(layer.parameters())
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    if weights:
        optimizer = make_optimizer(weights)
        optimizer.step()
    need = torch.cuda.memory_allocated(gpus[0]) - before
    return need, each(torch.Tensor.detach, output)


@functools.cache
def cut(needs, rooms):
    """Where each stage ends, such that the fullest GPU is as empty as possible."""
    if len(rooms) == 1:
        return (len(needs),)
    best = None
    for end in range(1, len(needs) - len(rooms) + 2):
        later = cut(needs[end:], rooms[1:])
        ends = (end, *(end + place for place in later))
        stages = zip((0, *ends[:-1]), ends, rooms, strict=True)
        fullest = max(sum(needs[a:b]) / room for a, b, room in stages)
        if best is None or fullest < best[0]:
            best = fullest, ends
    return best[1]


class Split(nn.Module):
    """Some layers on each GPU; what one returns is copied to the GPU of the next.

    A tied weight stays on the GPU of the first layer that has it. Layers on other GPUs
    get a copy in every step, through which autograd sends the gradient back.
    """

    def __init__(self, layers, ends, devices):
        super().__init__()
        starts = (0, *ends[:-1])
        stages = zip(starts, ends, devices, strict=True)
        self.places = [device for a, b, device in stages for _ in range(a, b)]
        self.layers, self.tied, owners = layers, [], {}
        for number, (layer, place) in enumerate(zip(layers, self.places, strict=True)):
            for name, weight in layer.named_parameters():
                if owners.setdefault(weight, place) != place:
                    self.tied.append((number, name, weight))
            layer.to(place)
        for _, _, weight in self.tied:  # which .to has taken away from its owner
            weight.data = weight.data.to(owners[weight])

    def copies(self):
        """For each layer, the copies of tied weights that it needs, by their names."""
        found = [{} for _ in self.layers]
        for number, name, weight in self.tied:
            found[number][name] = weight.to(self.places[number])
        return found

    def forward(self, batches, copies):
        """From a device -> the micro-batch on it, what the last layer returns."""
        x = None
        for layer, place, own in zip(self.layers, self.places, copies, strict=True):
            x = functional_call(layer, own, (move(x, place), batches[place]))
        return x


def loss_of(model, batch, parts):
    """The mean loss of a batch in so many parts, or fewer if it has fewer rows."""
    parts = min(parts, rows_of(batch))  # the last batch may be a small one
    devices = list(dict.fromkeys(model.places))
    there = {device: move(batch, device) for device in devices}
    losses, copies = [], model.copies()
    for number in range(parts):  # launches only: no .item(), no print
        part = {device: part_of(there[device], number, parts) for device in devices}
        with autocast():
            x = model(part, copies)
        losses.append(sum_of_losses(x, part[devices[-1]]) / counted(batch))
    return sum(losses)


@torch.no_grad()
def loss_before(model, batch, parts):
    """The loss without dropout; BatchNorm uses its running statistics."""
    model.eval()
    loss = loss_of(model, batch, parts).item()
    model.train()
    return loss


def check_the_parts(model, batch):
    """End the program if the loss of a batch is another one in parts; or return it."""
    one, cut_up = (loss_before(model, batch, number) for number in (1, parts))
    if not abs(one - cut_up) <= (1e-2 if options.bf16 else 1e-4) * abs(one):
        parser.error(
            f"the loss of a batch is {one:.4f}, and in {parts} parts {cut_up:.4f}: "
            "is sum_of_losses a mean, does a tensor belong to all samples, or does a "
            "layer mix samples? (Not BatchNorm: this check runs in eval mode.)"
        )
    return cut_up


def train(model):
    torch.manual_seed(0)  # both runs shuffle alike
    devices = list(dict.fromkeys(model.places))
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    optimizer = make_optimizer(model.parameters())  # after the model has moved
    found = []
    for batch in loader:
        total = loss_of(model, batch, parts)
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(total.item())
    peaks = [torch.cuda.max_memory_allocated(device) / 2**20 for device in devices]
    return found, peaks


def rows_of(batch):
    return len(next(v for v in batch.values() if isinstance(v, torch.Tensor)))


def check_the_rows(batch):
    """End the program if the batch cannot be cut into so many parts."""
    if not isinstance(batch, Mapping):
        parser.error("a batch is no dictionary: let each item of your data be one")
    tensors = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor)}
    rows = rows_of(batch)
    for name, tensor in tensors.items():
        if tensor.ndim == 0 or len(tensor) != rows:
            parser.error(
                f"{name!r} of a batch does not have {rows} rows, so it cannot be cut "
                "into micro-batches: repeat it for each sample, or keep it in a layer"
            )
    if not 1 <= parts <= rows:
        parser.error(f"--parts {parts}: a batch has {rows} rows")


def needs_of(layers, batch):
    """Bytes that training needs for each layer, measured on the first GPU."""
    batch = move(batch, gpus[0])
    for _ in range(2):  # the first calls make the workspaces of the libraries, too
        needs, x = [], None
        for number, layer in enumerate(layers):
            try:
                need, x = memory_of(layer, x, batch)
            except RuntimeError as error:
                raise RuntimeError(
                    f"layer {number} fails alone on {gpus[0]}: it must fit, and its "
                    "tensors must be parameters or buffers, or be in x or the batch"
                ) from error
            needs.append(need)
    return tuple(needs)


def main():
    whole = make_layers()
    if options.load:
        if not os.path.isfile(options.load):
            parser.error(f"--load {options.load}: there is no such file")
        whole.load_state_dict(torch.load(options.load, map_location="cpu"))
    first = next(iter(loader))
    check_the_rows(first)
    rooms = [torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus]
    ends = cut(needs_of(whole, first), tuple(rooms[: len(whole)]))
    split = Split(copy.deepcopy(whole), ends, gpus[: len(ends)])
    split_before = check_the_parts(split, first)
    split_losses, peaks = train(split)
    starts = (0, *ends[:-1])
    for start, end, device, peak in zip(starts, ends, gpus, peaks, strict=False):
        print(f"{device}: layers {start} to {end - 1}, peak {peak:.1f} MiB")
    torch.save(split.layers.state_dict(), "split_model.pt")  # loads with any other cut
    del split
    before = float("nan")
    try:
        alone = Split(whole, (len(whole),), gpus[:1])
        before = loss_before(alone, first, parts)
        losses, (peak,) = train(alone)
        print(f"one GPU: peak {peak:.1f} MiB")
    except torch.OutOfMemoryError:
        losses = [float("nan")] * len(split_losses)
        print("one GPU: out of memory")
    print(f"before: loss {split_before:.4f}, on one GPU {before:.4f}")
    if any("Dropout" in type(module).__name__ for module in whole.modules()):
        print("dropout draws other numbers: only the loss before must be equal")
    for step, (loss, one) in enumerate(zip(split_losses, losses, strict=True)):
        print(f"step {step}: loss {loss:.4f}, on one GPU {one:.4f}")


if __name__ == "__main__":  # not in the workers of a DataLoader
    main()
