"""Train a small GPT on text: on one CPU, on GPUs, on many ranks, restarted if need be.

    python train_gpt.py                                     # one process, on the CPU
    python train_gpt.py --device cuda                       # on one GPU
    python train_gpt.py --device cuda --parallel dp         # on all GPUs of a machine
    torchrun --standalone --nproc-per-node=4 train_gpt.py --parallel ddp
    torchrun … --max-restarts=3 train_gpt.py --parallel fsdp --folder FOLDER

Without GPUs, `python -m simgpu --gpus 4 train_gpt.py …` simulates them. Each
step takes the same `--batch` rows, whatever the number of ranks, and every way writes
the same checkpoint. So a run may move from any way to any other, and its losses stay
those of one process but for rounding. Needs `train_elastic.py` beside it.
Used in 27-train-it-all.
"""

import argparse
import datetime
import math
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel as DDP

from helpers import text

try:  # imported by a lesson
    from scripts.train_elastic import Log, newest, rows_of_step, save
except ModuleNotFoundError:  # launched: its folder is on the path
    from train_elastic import Log, newest, rows_of_step, save

# -- the model -------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and two linear layers.

    No biases: the gradient of the keys' bias would be zero but for rounding, and Adam
    makes full steps of whatever it is given. Its values would differ between two ways;
    the losses would not tell.
    """

    def __init__(self, width: int, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):  # (batch, tokens, width)
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=2)
        )  # (batch, heads, tokens, width of a head)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, letters: int, width: int, layers: int, context: int):
        super().__init__()
        torch.manual_seed(0)  # on the CPU, so the same numbers everywhere
        self.letter = nn.Embedding(letters, width)
        self.place = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, letters, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, x):  # (batch, tokens) -> (batch, tokens, letters)
        x = self.letter(x) + self.place.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def wrap(model: GPT, args) -> nn.Module:
    """What the training calls in place of the model. Here the ways part."""
    if args.parallel == "dp":
        return nn.DataParallel(model)
    if args.parallel == "ddp":
        return DDP(model, gradient_as_bucket_view=True)  # else gradients live twice
    if args.parallel == "fsdp":
        mesh = init_device_mesh(args.device, (dist.get_world_size(),))
        for block in model.blocks:  # what one call takes is gathered at once
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)  # the rest, or nobody averages it
    return model


# -- the training ----------------------------------------------------------------------


class Training:
    """A model, its optimizer and how far it is, in one of the ways."""

    def __init__(self, args):
        self.args, self.step, self.losses, self.bits = args, 0, [], []
        self.rank, self.ranks = 0, 1
        if dist.is_initialized():
            self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.text = text()
        self.rows = (len(self.text.train) - 1) // args.context
        sizes = args.width, args.layers, args.context
        self.model = GPT(len(self.text.letters), *sizes).to(args.device)
        self.parallel = wrap(self.model, args)
        # made after the wrap: fully_shard puts new parameters in place of the model's
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.rate)
        self.scaler = torch.amp.GradScaler(args.device, enabled=args.amp == "float16")

    def batch(self, tokens: torch.Tensor, rows: torch.Tensor):
        """The rows of a text, (rows, context), and the same one letter further on."""
        here = rows[:, None] * self.args.context + torch.arange(self.args.context)
        return tokens[here].to(self.args.device), tokens[here + 1].to(self.args.device)

    def loss_of(self, model: nn.Module, tokens, rows) -> torch.Tensor:
        """The sum over letters. (Means of unequal parts do not make the mean.)"""
        x, y = self.batch(tokens, rows)
        lower = {"dtype": getattr(torch, self.args.amp)} if self.args.amp else {}
        with torch.autocast(self.args.device, enabled=bool(lower), **lower):
            scores = model(x)
        scores = scores.float().flatten(0, 1)  # 8 bits are too few for a sum
        return cross_entropy(scores, y.flatten(), reduction="sum")

    def summed(self, number: torch.Tensor) -> float:
        if self.ranks > 1:
            dist.all_reduce(number)
        return number.item()

    def mine(self) -> torch.Tensor:
        """This rank's rows of the step; those of all ranks are one process's."""
        rows = rows_of_step(self.step, self.args.batch, self.rows)
        return rows[self.rank :: self.ranks]

    def quietly(self, last: bool):
        """Send gradients after the last part only, when all of them are added up."""
        if self.args.parallel == "fsdp":
            self.parallel.set_requires_gradient_sync(last)
        if self.args.parallel == "ddp" and not last:
            return self.parallel.no_sync()
        return nullcontext()

    def take_step(self) -> float:
        """The mean loss over the rows of all ranks."""
        args, total = self.args, 0
        letters = args.batch * args.context  # of all ranks and all parts
        for i, part in enumerate(self.mine().tensor_split(args.accumulate)):
            with self.quietly(i == args.accumulate - 1):  # forward pass and backward
                loss = self.loss_of(self.parallel, self.text.train, part) / letters
                # DDP and FSDP divide by the ranks, although this is a part of a sum
                self.scaler.scale(loss * self.ranks).backward()
            total += loss.detach()
        self.scaler.unscale_(self.optimizer)  # clip gradients, not scaled ones
        nn.utils.clip_grad_norm_(self.model.parameters(), args.clip)
        self.scaler.step(self.optimizer)  # leaves out a step that overflowed
        self.scaler.update()
        self.optimizer.zero_grad()
        self.step += 1
        return self.summed(total)

    @torch.no_grad()
    def test(self) -> float:
        """Bits per letter of the held-out text; for all ranks, as FSDP gathers."""
        tokens = self.text.test
        rows = torch.arange((len(tokens) - 1) // self.args.context)
        total = self.loss_of(self.model, tokens, rows[self.rank :: self.ranks])
        self.rest()
        return self.summed(total) / len(rows) / self.args.context / math.log(2)

    @torch.no_grad()
    def write(self, start: str, letters: int) -> str:
        """Go on with a text, letter by letter; for all ranks, too."""
        tokens = [self.text.letters.index(letter) for letter in start]
        dice = torch.Generator().manual_seed(0)  # the same in all ranks
        for _ in range(letters):
            x = torch.tensor([tokens[-self.args.context :]], device=self.args.device)
            chances = (self.model(x)[0, -1].float().cpu() / 0.5).softmax(0)
            tokens.append(int(torch.multinomial(chances, 1, generator=dice)))
        self.rest()
        return self.text.words(tokens)

    def rest(self) -> None:
        """A forward pass without backward() leaves FSDP's root whole."""
        if self.args.parallel == "fsdp":
            self.model.reshard()

    # -- checkpoints -------------------------------------------------------------------

    def save(self) -> None:
        """One file, the same in every way: whole tensors by the bare model's names.

        All ranks must call it, because whole tensors are gathered; rank 0 writes.
        """
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, state = get_state_dict(self.model, self.optimizer, options=whole)
        if self.rank == 0:
            everything = {"model": weights, "optimizer": state, "step": self.step}
            scaler = self.scaler.state_dict()  # forgotten, it would start anew
            save(self.args.folder, self.step, {**everything, "scaler": scaler})

    def load(self) -> None:
        """Go on from the newest checkpoint that is whole, if there is one."""
        box = [newest(self.args.folder)[0] if self.rank == 0 else None]
        if self.ranks > 1:  # one rank reads, so that all start from the same
            dist.broadcast_object_list(box)
        if (found := box[0]) is None:
            return
        whole = StateDictOptions(full_state_dict=True)
        weights, state, self.step = found["model"], found["optimizer"], found["step"]
        set_state_dict(
            self.model, self.optimizer,
            model_state_dict=weights, optim_state_dict=state, options=whole,
        )  # fmt: skip
        if found["scaler"]:  # empty, unless a way with float16 has written it
            self.scaler.load_state_dict(found["scaler"])

    def run(self) -> "Training":
        """Train to the last step; the losses and the bits before and after are kept."""
        args, log = self.args, lambda *_, **__: None
        if args.folder and dist.is_initialized():
            log = Log(args.folder)
        if args.folder:
            self.load()
        log("loaded", step=self.step)
        self.bits.append(self.test())
        while self.step < args.steps:
            step, rows = self.step, self.mine().tolist()
            while step == args.hold and not (args.folder / f"go-{step}").exists():
                time.sleep(0.01)
            self.losses.append(self.take_step())
            log("step", step=step, rows=rows, loss=self.losses[-1])
            if args.folder and self.step % args.every == 0:
                self.save()
        self.bits.append(self.test())
        return self


# -- the script ------------------------------------------------------------------------


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT, in any way.")
    add, ranks = parser.add_argument, int(os.environ.get("WORLD_SIZE", 0))
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--parallel", default="", choices=("dp", "ddp", "fsdp"))
    add("--amp", default="", choices=("bfloat16", "float16"), help="type of autocast")
    add("--accumulate", type=int, default=1, metavar="PARTS", help="of each batch")
    add("--steps", type=int, default=30)
    add("--batch", type=int, default=16, help="rows of all ranks")
    add("--rate", type=float, default=2e-3, help="learning rate")
    add("--clip", type=float, default=1.0, help="the norm of the gradient")
    add("--width", type=int, default=64)
    add("--layers", type=int, default=2)
    add("--context", type=int, default=64, help="letters of a row")
    add("--folder", type=Path, help="of checkpoints, to go on from the newest")
    add("--every", type=int, default=5, help="steps to a checkpoint")
    add("--hold", type=int, help="wait before this step for a file FOLDER/go-STEP")
    add("--write", type=int, default=0, metavar="LETTERS", help="at the end")
    args = parser.parse_args(arguments)
    if (args.parallel in ("ddp", "fsdp")) != bool(ranks):
        parser.error("--parallel ddp and fsdp go with torchrun, and only with it")
    if args.batch < max(1, ranks) * args.accumulate:
        parser.error("--batch is less than one row for each rank and part")
    if args.amp == "float16" and args.device == "cpu":
        parser.error("--amp float16 needs --device cuda")
    if args.parallel == "dp" and args.device == "cpu":
        parser.error("--parallel dp needs --device cuda")
    if args.folder:
        args.folder.mkdir(parents=True, exist_ok=True)
    elif args.hold is not None:
        parser.error("--hold needs --folder")
    return args


def work(args) -> str:
    """Train, and say how it went: rank 0 does.

    A function of its own, so that DDP's model is gone before the process group is
    destroyed. The other way round the last of DDP would destroy the group, and wait for
    a thread of gloo that waits for Python: now and then a rank would never end.
    """
    training = Training(args).run()
    written = training.write("The ", args.write) if args.write else ""
    before, after = training.bits
    words = f"{training.ranks} x {args.device}: {before:.3f} bits a letter, after step"
    words += f" {training.step} {after:.3f}\n{written}".rstrip() + "\n"
    return words if training.rank == 0 else ""


@record  # an exception goes to the agent as a file, and into its last words
def main(arguments: list[str] | None = None) -> None:
    args = options(arguments)
    if args.parallel in ("ddp", "fsdp"):
        if args.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        patience = datetime.timedelta(minutes=2)  # else half an hour with gloo
        kind = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo"
        dist.init_process_group(kind, timeout=patience)
    print(work(args), end="")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # A thread of gloo may still hold a tensor while Python shuts down, which aborts
    # the process ("terminate called without an active exception"). So leave at once.
    sys.stdout.flush()
    os._exit(0)
