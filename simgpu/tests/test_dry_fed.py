"""What a step is fed, as a dry run counts it: tokens, samples, images."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from simgpu._dry.report import merged
from simgpu._dry.run import Job, run


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(64, shape).cuda()


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape).cuda()


class Words(nn.Module):
    """Words, places and segments, as BERT has them."""

    def __init__(self, rows: int = 64):
        super().__init__()
        self.words = nn.Embedding(rows, 8)
        self.places = nn.Embedding(512, 8)
        self.segments = nn.Embedding(2, 8)

    def forward(self, x, segments=None):
        places = torch.arange(x.shape[-1], device=x.device).expand(x.shape)
        segments = torch.zeros_like(x) if segments is None else segments
        return self.words(x) + self.places(places) + self.segments(segments)


class Distances(nn.Module):
    """T5's bias: a table that is looked up for each pair of places."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(32, 1)

    def forward(self, x):
        place = torch.arange(x.shape[1], device=x.device)
        away = place[None] - place[:, None]
        far = torch.log(away.abs().float() + 1).long().clamp(max=31)
        near = torch.min(away.abs(), torch.full_like(away, 31))
        return x + self.table(torch.where(away.abs() < 8, near, far)).mean()


class Translator(nn.Module):
    """An encoder and a decoder, each with a table or with one for both."""

    def __init__(self, shared: bool):
        super().__init__()
        self.encoder = nn.ModuleList([nn.Embedding(64, 8), Distances()])
        self.decoder = nn.ModuleList([nn.Embedding(64, 8), Distances()])
        if shared:
            self.decoder[0] = self.encoder[0]
        self.stacks = nn.ModuleList(map(Stack, (self.encoder, self.decoder)))

    def forward(self, source, target):
        return self.stacks[0](source).mean() + self.stacks[1](target)


class Stack(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Labelled(nn.Module):
    """Images of which a table has a row for each class, as DiT has."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.classes = nn.Embedding(64, 8)

    def forward(self, x, labels):
        return self.stem(x).mean((2, 3)) + self.classes(labels)


class Seen(nn.Module):
    """Patches with a table of places, as CLIP's images have."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 8, 8)
        self.places = nn.Embedding(16, 8)
        self.register_buffer("order", torch.arange(16))

    def forward(self, pixels):
        return self.stem(pixels).flatten(2).mT + self.places(self.order)


class Checkpointed(Words):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Both(nn.Module):
    """Images and captions."""

    def __init__(self):
        super().__init__()
        self.seen, self.words = Seen(), Words()

    def forward(self, batch):
        return self.seen(batch["pixels"]).mean() + self.words(batch["ids"])


def call(model, *args, **kwargs):
    return lambda: model(*args, **kwargs).mean()


def with_frozen_text(model, text):
    def loss():
        with torch.no_grad():
            text(ids(4, 77))
        return model(numbers(4, 3, 32, 32)).mean()

    return loss


def with_a_loss(model):
    measure = nn.CrossEntropyLoss()

    def loss():
        out = model(ids(4, 16)).view(-1, 8)
        return measure(out, torch.zeros(len(out), dtype=int, device="cuda"))

    return loss


PROGRAMS = {
    "words": (lambda: call(Words().cuda(), ids(4, 16)), (64, 4, "samples")),
    "words by name": (lambda: call(Words().cuda(), x=ids(4, 16)), (64, 4, "samples")),
    "fed segments": (
        lambda: call(Words().cuda(), ids(4, 16), ids(4, 16) % 2),
        (64, 4, "samples"),
    ),
    "counted up instead of tokens": (
        lambda: call(Words().cuda(), torch.arange(64, device="cuda").view(4, 16)),
        (64, 4, "samples"),
    ),
    "one long sequence": (lambda: call(Words().cuda(), ids(64)), (64, 64, "samples")),
    "a checkpoint": (
        lambda: call(Checkpointed().cuda(), ids(4, 16)),
        (64, 4, "samples"),
    ),
    "a loss that is a module": (
        lambda: with_a_loss(Words().cuda()),
        (64, 4, "samples"),
    ),
    "translation": (
        lambda: call(Translator(False).cuda(), ids(2, 40), ids(2, 30)),
        (140, 2, "samples"),
    ),
    "translation, one table": (
        lambda: call(Translator(True).cuda(), ids(2, 40), ids(2, 40)),
        (160, 2, "samples"),
    ),
    "images": (
        lambda: call(Seen().cuda(), numbers(4, 3, 32, 32)),
        (None, 4, "images"),
    ),
    "labelled images": (
        lambda: call(Labelled().cuda(), numbers(4, 3, 32, 32), ids(4)),
        (None, 4, "images"),
    ),
    "images and captions": (
        lambda: call(
            Both().cuda(), {"pixels": numbers(4, 3, 32, 32), "ids": ids(4, 9)}
        ),
        (36, 4, "images"),
    ),
    "images with frozen text": (
        lambda: with_frozen_text(Seen().cuda(), Words().cuda()),
        (None, 4, "images"),
    ),
    "sound": (
        lambda: call(nn.Conv1d(80, 8, 3).cuda(), numbers(4, 80, 100)),
        (None, 4, "samples"),
    ),
    "rows": (lambda: call(nn.Linear(9, 8).cuda(), numbers(4, 9)), (None, 4, "samples")),
    "no module": (lambda: functional(), (None, None, "samples")),
}


def functional():
    weight = nn.Parameter(torch.randn(8, 8, device="cuda"))
    nn.Linear(8, 8).cuda()(numbers(1, 8)).sum().backward()

    def loss():
        return (numbers(4, 8) @ weight).mean()

    return loss


def train(make, micro: int = 1) -> None:
    loss = make()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1, device="cuda"))])
    for _ in range(3):
        for _ in range(micro):
            loss().backward()
        optimizer.step()


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_fed_is_counted(name):
    make, expected = PROGRAMS[name]
    found = run(Job(8), lambda: train(make))
    each = tuple(n and n // 8 for n in (found.tokens, found.samples))
    assert (*each, found.samples_are) == expected


def test_all_micro_batches_count():
    make, (tokens, samples, _) = PROGRAMS["words"]
    found = run(Job(8), lambda: train(make, micro=5))
    assert (found.tokens, found.samples) == (8 * 5 * tokens, 8 * 5 * samples)


@pytest.mark.parametrize(
    "name, tokens, samples", [("tp", 4, 4), ("cp", 8, 4), ("replicas", 8, 8)]
)
def test_ranks_that_share_samples(name, tokens, samples):
    """Of eight ranks, two and two are a model's, a sequence's, or by themselves."""
    make, (each, rows, _) = PROGRAMS["words"]

    def program():
        init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp", name))
        train(make)

    found = run(Job(8), program)
    assert (found.tokens, found.samples) == (tokens * each, samples * rows)


def test_what_the_user_says_counts():
    make, _ = PROGRAMS["images"]
    found = run(Job(8, samples=48), lambda: train(make))
    assert found.samples == 48 and found.samples_per_second == 48 / found.step_seconds
    assert "(48 images a step)" in str(found)
    assert merged([found, found]).samples == 48


def test_a_report_says_tokens_or_else_samples_and_always_images():
    def said(name: str) -> list[str]:
        words = str(run(Job(8), lambda: train(PROGRAMS[name][0]))).split()
        return [word for word in words if word.endswith("/s,")]

    assert said("words") == ["tokens/s,"]
    assert said("rows") == ["samples/s,"]
    assert said("images and captions") == ["tokens/s,", "images/s,"]


def test_places_that_are_filled_with_tokens_are_tokens():
    """A buffer that a program has counted up and then copies its batch into."""
    table = []

    def make():
        table.append(nn.Embedding(64, 8).cuda())
        buffer = torch.arange(64, device="cuda").view(4, 16)

        def loss():
            buffer.copy_(ids(4, 16))
            away = torch.arange(100, device="cuda")
            return F.embedding(buffer, table[0].weight).mean() + table[0](away).mean()

        return loss

    assert run(Job(1), lambda: train(make)).tokens == 64
