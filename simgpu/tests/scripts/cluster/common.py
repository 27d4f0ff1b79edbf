"""What the programs of this folder share: a small GPT, its data, a comparison."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional as F

TOKENS = 32  # that the vocabulary has
HEAD = 8  # numbers in one attention head


def join(backend: str = "nccl") -> tuple[int, int, torch.device]:
    """What a program begins with: its rank, how many there are, and its GPU."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group(backend, device_id=device)
    return dist.get_rank(), dist.get_world_size(), device


def leave(words: str) -> None:
    """What it ends with; one rank says that all is well."""
    speaks = dist.get_rank() == 0
    dist.destroy_process_group()
    if speaks:
        print(f"ok {words}")


def check(what: str, found: torch.Tensor, expected) -> None:
    """The same values, to the bit, on this rank's GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    expected = torch.as_tensor(expected, dtype=found.dtype, device=device)
    assert found.device == device, (what, found.device)
    if found.is_floating_point() and found.itemsize == 1:  # float8 has no `equal`
        found, expected = found.float(), expected.float()
    assert torch.equal(found, expected), (what, found, expected)


def block(r: int, size: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What rank `r` has: `size` numbers from 10r."""
    return torch.arange(10 * r, 10 * r + size, device="cuda").to(dtype)


def done(work: dist.Work) -> None:
    work.wait()
    torch.cuda.synchronize()
    assert work.is_completed()


class Attention(nn.Module):
    """Causal self-attention; the number of heads follows from the local weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape

        def heads(linear: nn.Linear) -> torch.Tensor:
            return linear(x).view(rows, length, -1, HEAD).transpose(1, 2)

        q, k, v = heads(self.query), heads(self.key), heads(self.value)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, -1))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.feed = FeedForward(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):
    """A decoder: embeddings, blocks, a last norm, and a head for the next token."""

    def __init__(self, blocks: int = 2, width: int = 32, length: int = 16) -> None:
        super().__init__()
        self.token = nn.Embedding(TOKENS, width)
        self.place = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, TOKENS, bias=False)

    def forward(
        self, tokens: torch.Tensor, places: torch.Tensor | None = None
    ) -> torch.Tensor:
        if places is None:
            places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.place(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def init_weights(self) -> None:
        """Fill parameters that have no values yet: after `to_empty`."""
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()


class Part(nn.Module):
    """The blocks of one stage; the first embeds the tokens, the last has the head."""

    def __init__(self, model: GPT, stage: int, stages: int) -> None:
        super().__init__()
        each = len(model.blocks) // stages
        self.blocks = nn.ModuleDict(
            {str(i): model.blocks[i] for i in range(stage * each, (stage + 1) * each)}
        )
        first, last = stage == 0, stage == stages - 1
        self.token, self.place = (model.token, model.place) if first else (None, None)
        self.norm, self.head = (model.norm, model.head) if last else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.token is not None:
            places = torch.arange(x.shape[1], device=x.device)
            x = self.token(x) + self.place(places)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def split_plan(model: nn.Module, loss_parallel: bool) -> dict[str, ParallelStyle]:
    """How to split a GPT or a part of it: tensor parallel, and by sequence between."""
    gather = PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate()
    )
    plan = {
        "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "place": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1),
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
        "blocks.*.norm1": SequenceParallel(),
        "blocks.*.norm2": SequenceParallel(),
        "blocks.*.attention": gather,
        "blocks.*.feed": gather,
        "blocks.*.attention.query": ColwiseParallel(),
        "blocks.*.attention.key": ColwiseParallel(),
        "blocks.*.attention.value": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.feed.up": ColwiseParallel(),
        "blocks.*.feed.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    has = {name.split(".")[0] for name, _ in model.named_children()}
    return {name: way for name, way in plan.items() if name.split(".")[0] in has}


def batches(steps: int, rows: int, length: int = 16, device="cpu") -> torch.Tensor:
    """Token sequences that every rank makes alike, `(steps, rows, length + 1)`."""
    make = torch.Generator().manual_seed(1)
    shape = (steps, rows, length + 1)
    return torch.randint(0, TOKENS, shape, generator=make).to(device)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of the next token, in float32 whatever the model has."""
    logits = model(batch[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank: for a DTensor, a collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def agree(what: str, found, expected, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Raise an error that names `what`, unless two float32 results agree."""
    found, expected = torch.as_tensor(found), torch.as_tensor(expected)
    torch.testing.assert_close(
        full(found.detach()),
        full(expected.detach()),
        rtol=rtol,
        atol=atol,
        check_device=False,
        msg=lambda text: f"{what}: {text}",
    )


def agree_on(what: str, found: nn.Module, expected: nn.Module, **bounds) -> None:
    """Compare two models, parameter by parameter and gradient by gradient."""
    other = dict(expected.named_parameters())
    for name, parameter in found.named_parameters():
        agree(f"{what}: {name}", parameter, other[name], **bounds)
        if parameter.grad is not None:
            grads = parameter.grad, other[name].grad
            agree(f"{what}: gradient of {name}", *grads, **bounds)


def adamw(model: nn.Module, **options) -> torch.optim.AdamW:
    """AdamW whose `eps` keeps rounding errors of tiny gradients from growing."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, **options)
