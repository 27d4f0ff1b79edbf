"""What all trainers share, none of it about models or about where their parts lie.

Options, which rows a step takes, the learning rate, what is logged, and checkpoints.
Works on one GPU without a process group, and on the ranks of one.
"""

import argparse
import json
import math
import os
import signal
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import data
import model as its
import seam
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Sampler
from torch.utils.flop_counter import FlopCounterMode
from values import ties

# -- options ---------------------------------------------------------------------------


def options(arguments=None, needs=(), **more):
    """The options of a trainer; `more` are those that only it has, and their help.

    `needs` are names that model.py must have for it, besides those that all need.
    """
    parser = argparse.ArgumentParser(description="Train the model of model.py.")
    add = parser.add_argument
    add("--data", type=Path, required=True, help="text, or .npy of token numbers")
    add("--size", default="tiny", help="one of the sizes in model.py")
    add("--context", type=int, default=64, help="tokens of a row")
    add("--batch", type=int, default=16, help="rows of a step, of all ranks together")
    add("--accumulate", type=int, default=1, help="parts of a rank's rows")
    add("--steps", type=int, default=30)
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--warmup", type=int, default=5, help="steps until it is reached")
    add("--decay", type=float, default=0.1, help="weight decay")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--float32", action="store_true", help="compute in float32, not in bfloat16")
    add("--recompute", action="store_true", help="activations, in the backward pass")
    add("--compile", action="store_true", help="each block, by torch.compile")
    add("--weights", type=Path, help="file with a state dict to start from")
    add("--folder", type=Path, help="of checkpoints; goes on from the newest")
    add("--end", type=int, help="token that ends a document, in a .npy file")
    add("--every", type=int, default=10, help="steps between tests and checkpoints")
    add("--tests", type=int, default=20, help="most batches of a test")
    add("--show", type=int, default=1, help="steps between lines of the log")
    add("--workers", type=int, default=2, help="processes that read data")
    add("--profile", type=Path, help="file for the timeline of steps 3 and 4")
    add("--peak", type=float, help="TFLOP/s of one GPU, for the MFU")
    for name, text in more.items():
        add(f"--{name}", type=int, default=1, help=text)
    args = parser.parse_args(arguments)
    least_one = "context", "batch", "accumulate", "steps", "every", "tests", "show"
    for name in (*least_one, *more):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is at least 1")
    seam.check(its, [*needs, *["slices"] * (getattr(args, "tp", 1) > 1)])
    return args


# -- data ------------------------------------------------------------------------------


class Steps(Sampler):
    """The rows of one rank, step by step and part by part.

    A step takes the same rows of the data for any number of ranks, and from whichever
    step on the training goes.
    """

    def __init__(self, rows, first, last, args, rank, ranks, shuffled=True):
        self.rows, self.first, self.last, self.args = rows, first, last, args
        self.rank, self.ranks, self.shuffled = rank, ranks, shuffled

    def __len__(self):
        return (self.last - self.first) * self.args.accumulate

    def __iter__(self):
        of_epoch = None
        for step in range(self.first, self.last):
            epoch, place = divmod(step, self.rows // self.args.batch)
            if epoch != of_epoch:  # once an epoch, not once a step
                of_epoch, order = epoch, self.order_of(epoch)
            rows = order[place * self.args.batch :][: self.args.batch]
            for part in rows[self.rank :: self.ranks].tensor_split(
                self.args.accumulate
            ):
                yield part.tolist()

    def order_of(self, epoch):
        if not self.shuffled:
            return torch.arange(self.rows)
        generator = torch.Generator().manual_seed(epoch)
        return torch.randperm(self.rows, generator=generator)


def stay(worker):
    """torchrun sends SIGTERM to these too; a rank saves first, then ends its own."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Data:
    """Batches to learn from and to be tested on, of one of the ranks that share them.

    Args:
        args: options.
        rank: which of the ranks that have different rows.
        ranks: how many those are.
    """

    def __init__(self, args, rank=0, ranks=1):
        self.args, self.rank, self.ranks = args, rank, ranks
        more = {} if args.end is None else {"end": args.end}
        self.train, self.test = data.sets(args.data, args.context, **more)
        least = ranks * args.accumulate
        if args.batch < least:
            raise ValueError(
                f"--batch={args.batch} has no row for each of {ranks} ranks times "
                f"--accumulate={args.accumulate}; it is at least {least}"
            )
        for what, rows in (("train on", self.train), ("test", self.test)):
            if len(rows) < args.batch:
                raise ValueError(
                    f"{args.data} has {len(rows)} rows to {what}, less than a batch of "
                    f"{args.batch}; take more data, or a smaller --batch or --context"
                )
        self.waited = 0.0  # seconds in which the GPU's host had to wait for data

    def steps(self, first):
        """For each step from this one on, its number and its parts."""
        args = self.args
        of = self._steps(len(self.train), first, args.steps)
        batches = self._batches(self.train, of)
        for step in range(first, args.steps):
            yield step, [next(batches) for _ in range(args.accumulate)]

    def tests(self):
        """The parts of each batch to be tested on. What fills no batch is left out."""
        count = min(self.args.tests, len(self.test) // self.args.batch)
        of = self._steps(len(self.test), 0, count, False)
        batches = self._batches(self.test, of)
        for _ in range(count):
            yield [next(batches) for _ in range(self.args.accumulate)]

    def _steps(self, rows, first, last, shuffled=True):
        return Steps(rows, first, last, self.args, self.rank, self.ranks, shuffled)

    def _batches(self, dataset, steps):
        loader = DataLoader(
            dataset,
            batch_sampler=steps,
            num_workers=self.args.workers,
            worker_init_fn=stay,
            pin_memory=True,
        )
        batches = iter(loader)
        while True:
            begin = time.perf_counter()
            batch = next(batches, None)
            self.waited += time.perf_counter() - begin
            if batch is None:
                return
            yield {
                name: part.cuda(non_blocking=True) if torch.is_tensor(part) else part
                for name, part in batch.items()
            }


def joined(parts):
    """One batch of several; a pipeline cuts it again."""
    for name, part in parts[0].items():
        if not torch.is_tensor(part):
            raise ValueError(f"{name} in a batch is no tensor; stages take no other")
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def flops_of_a_row(loaded, args):
    """Of matmuls, forward and backward: counted on "meta", where none is computed."""
    with torch.device("meta"):
        model = its.make(args.size, args.context).eval()
    row = torch.utils.data.default_collate([loaded.train[0]])
    row = {
        n: part.to("meta") if torch.is_tensor(part) else part for n, part in row.items()
    }
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(row)
    except RuntimeError as error:
        raise ValueError("--peak cannot count this model; leave it out") from error
    return 3 * counter.get_total_flops()


# -- steps -----------------------------------------------------------------------------


def optimizer_of(model, args, group=None):
    """AdamW on what learns; its decay on what the model's file says.

    Args:
        model: this rank's part.
        args: options.
        group: of the ranks that learn from other rows or tokens; None is none.
    """
    if group is not None and dist.get_world_size(group) > 1:
        for name, module in model.named_modules():
            if is_own_norm(module):
                raise ValueError(
                    f"{name} takes the mean of this rank's rows, so more ranks train "
                    "another model; take nn.SyncBatchNorm"
                )
    groups = {True: [], False: []}
    for name, p in model.named_parameters():
        if p.requires_grad:
            groups[its.decayed(name, p)].append(p)
    settings = [
        {"params": found, "weight_decay": args.decay * decayed}
        for decayed, found in groups.items()
        if found
    ]
    optimizer = torch.optim.AdamW(settings, lr=args.lr, betas=(0.9, 0.95), fused=True)

    def add_up(tensor):
        if group is not None:
            dist.all_reduce(tensor, group=group)

    its_own = getattr(model, "module", model)  # DDP's
    optimizer.register_step_post_hook(lambda *_: its_own.adjust(add_up))
    return optimizer


def is_own_norm(module):
    """Whether it is a BatchNorm that learns, of one rank's rows alone."""
    kinds = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
    return isinstance(module, kinds) and module.training


def set_rate(optimizer, step, args):
    """Up in a line, then down by a cosine to a tenth."""
    if step < args.warmup:
        rate = args.lr * (step + 1) / args.warmup
    else:
        done = (step - args.warmup) / max(1, args.steps - args.warmup)
        rate = args.lr * (0.55 + 0.45 * math.cos(math.pi * done))
    for settings in optimizer.param_groups:
        settings["lr"] = rate


def recompute(model):
    """Let blocks keep what they read only, and compute the rest again in backward."""
    for block in model.blocks:
        block.forward = _again(block.forward)


def _again(forward):
    return lambda *inputs: checkpoint(forward, *inputs, use_reentrant=False)


def plain(tensor):
    """The full values, where a tensor is of a mesh."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def add_up(model):
    """Sum the gradients of what every rank has whole, but used in its own way."""
    for p in model.parameters():
        if isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
            p.grad = p.grad.redistribute(placements=p.placements)


def clip(model, most, group=None, copies=()):
    """Scale all gradients down to this norm; returns the norm that they had.

    Parameters of one mesh are added up by themselves: a norm over tensors of two meshes
    is an error.

    Args:
        model: this rank's part.
        most: the norm.
        group: of the ranks that have its other parts.
        copies: parameters of which another part counts the gradient.
    """
    meshes, squares = defaultdict(list), torch.zeros((), device="cuda")
    for name, p in model.named_parameters():
        if p.grad is not None:
            meshes[getattr(p, "device_mesh", None)].append(p)
        elif p.requires_grad and not hasattr(model, "has_learned"):
            raise ValueError(
                f"{name} has no gradient after the first step. Freeze it, if nothing "
                "uses it; in a stage, name it in FIRST or LAST of model.py"
            )
    model.has_learned = True
    for found in meshes.values():
        grads = [p.grad for p in found if not any(p is copy for copy in copies)]
        squares += plain(nn.utils.get_total_norm(grads)) ** 2
    if group is not None:
        dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    for found in meshes.values():
        nn.utils.clip_grads_with_norm_(found, most, norm)
    return norm


# -- what is seen of it ----------------------------------------------------------------


class Log:
    """A line of JSON every few steps; and whether somebody asked for an end (SIGTERM).

    Args:
        args: options.
        loaded: the `Data`, which knows how long it was waited for.
    """

    def __init__(self, args, loaded):
        self.args, self.loaded = args, loaded
        self.flops = flops_of_a_row(loaded, args) if args.peak else 0
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        self.begin.record()
        self.steps, self.pauses = 0, []
        self.going, self.copied = torch.ones(()), torch.cuda.Event()
        self.profiler = self._profiler() if args.profile else None

    def _ask(self, number, frame):
        self.asked = True

    def _profiler(self):
        profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1),
            on_trace_ready=lambda p: p.export_chrome_trace(str(self.args.profile)),
        )
        if is_first():
            profiler.start()
            return profiler

    def step(self, step, loss, norm, optimizer):
        """Count a step; print a line if it is time. True if all ranks should stop.

        Args:
            step: its number.
            loss: this rank's share of the mean, on the GPU.
            norm: of the gradient.
            optimizer: whose learning rate is shown.
        """
        args = self.args
        if self.profiler:
            self.profiler.step()
        self.steps += 1
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        numbers = torch.stack([loss, torch.full_like(loss, (not self.asked) / ranks)])
        if dist.is_initialized():
            dist.all_reduce(numbers)
        if (step + 1) % args.show and step + 1 < args.steps:
            self.copied.synchronize()  # of the step before: this one is not waited for
            going = self.going.item()
            self.going = numbers[1].to("cpu", non_blocking=True)
            self.copied.record()
            return going < 1 - 0.5 / ranks
        self.end.record()
        loss, going, norm = [*numbers.tolist(), norm.item()]  # waits for the GPU
        seconds = self.begin.elapsed_time(self.end) / 1e3
        seconds -= sum(start.elapsed_time(end) for start, end in self.pauses) / 1e3
        seconds /= self.steps
        rows = args.batch / seconds
        line = {"step": step, "loss": round(loss, 6), "norm": round(norm, 6)}
        line["lr"] = round(optimizer.param_groups[0]["lr"], 8)
        line["tokens_per_s"] = round(rows * args.context)
        line["waited_ms"] = round(1e3 * self.loaded.waited / self.steps, 1)
        line["peak_MiB"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
        if args.peak:
            line["mfu"] = round(rows * self.flops / (1e12 * args.peak * ranks), 4)
        say(line)
        self.steps, self.loaded.waited, self.pauses = 0, 0.0, []
        self.begin.record()
        return going < 1 - 0.5 / ranks

    @contextmanager
    def paused(self):
        """What is done in here, tests and checkpoints, is no time of a step."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
        waited = self.loaded.waited
        start.record()
        yield
        end.record()
        self.pauses.append((start, end))
        self.loaded.waited = waited


def is_first():
    return not dist.is_initialized() or dist.get_rank() == 0


def say(line):
    """Print a line of JSON, from one rank."""
    if is_first():
        print(json.dumps(line), flush=True)


def say_test(step, loss):
    say({"step": step, "test": round(loss, 6)})


# -- checkpoints -----------------------------------------------------------------------

FLAT = states.StateDictOptions(flatten_optimizer_state_dict=True)


def save(step, model, optimizer, args):
    """Each tensor is written once, by whoever has it. Checkpoints do not overlap."""
    found, _ = state_of(model, optimizer, args)
    folder, alone = args.folder / f"step-{step:06}", not dist.is_initialized()
    dcp.save(found, checkpoint_id=folder, no_dist=alone)


def state_of(model, optimizer, args):
    """What a checkpoint has, and the optimizer's names here by those that it has there.

    An optimizer calls a tied parameter by one of its names: by the first that this rank
    has. In a checkpoint, it is the first of all.
    """
    weights, state = states.get_state_dict(model, optimizer, options=FLAT)
    with torch.device("meta"):
        tied = ties(its.make(args.size, args.context))
    first = {name: names[0] for names in tied for name in names}
    here = {}
    for key in state:
        kind, _, rest = key.partition(".")  # "state", or "param_groups"
        name, _, what = rest.rpartition(".")
        here[f"{kind}.{first.get(name, name)}.{what}"] = key
    named = {there: state[key] for there, key in here.items()}
    read = f"--batch={args.batch} --context={args.context}"
    if args.data.is_file():  # another text has other rows
        read += f" --data of {args.data.stat().st_size} bytes"
    return {"model": weights, "optimizer": named, "read": read}, here


def load(model, optimizer, args):
    """The step to go on from: rank 0 finds the newest, and tells its number alone."""
    newest = torch.zeros((), dtype=torch.int64, device="cuda")
    if args.folder and is_first():
        whole = args.folder.glob("step-*/.metadata")  # is written last
        newest += max((int(file.parent.name[5:]) for file in whole), default=0)
    if dist.is_initialized():
        dist.broadcast(newest, 0)
    step = int(newest)
    if step:
        found, here = state_of(model, optimizer, args)
        folder, alone = args.folder / f"step-{step:06}", not dist.is_initialized()
        now = found["read"]
        dcp.load(found, checkpoint_id=folder, no_dist=alone)
        if found["read"] != now:
            raise ValueError(
                f"{folder} was written with {found['read']}: with {now}, step {step} "
                "has other rows than those that come next; take another --folder"
            )
        state = {key: found["optimizer"][there] for there, key in here.items()}
        states.set_state_dict(
            model, optimizer, model_state_dict=found["model"], optim_state_dict=state,
            options=FLAT,
        )  # fmt: skip
        done = "nothing to do after" if step >= args.steps else "goes on after"
        say({done: str(folder)})
    return step


def device():
    """This process's GPU, now the current one."""
    found = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(found)
    return found
