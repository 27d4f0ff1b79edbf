"""The programs whose times were recorded on real GPUs, for `simgpu.estimate`.

Each function here makes a `Program` on "meta" that measures itself as the recorded one
did, with CUDA events around the same lines:

    program = steps_fp32("gpt2_large", "train", 4, 1024)
    simgpu.estimate(program.function, *program.arguments, card="H100")
    program.measured["forward"]  # simulated seconds

Leaves out: loading of data, logging, and what only the first steps cost.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.nn import functional as F

from recorded import models

_LANGUAGE = {
    "gpt2_large": (models.Gpt2, models.GPT2_LARGE),
    "gpt3_xl": (models.Gpt2, models.GPT3_XL),
    "opt_13": (models.Opt, models.OPT_13),
}


class Program(NamedTuple):
    """What `simgpu.estimate` runs."""

    function: Callable
    arguments: tuple
    # what the function has measured, once it has run: seconds, bytes, counts
    measured: dict[str, float]


class _Seconds:
    """Seconds between two events around a block, as GPU programs measure them."""

    def __init__(self, measured: dict[str, float], name: str):
        self.measured, self.name = measured, name

    def __enter__(self):
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.start.record()

    def __exit__(self, *_):
        self.end.record()
        torch.cuda.synchronize()
        self.measured[self.name] = self.start.elapsed_time(self.end) / 1000


# -- steps_fp32.json -------------------------------------------------------------------


def steps_fp32(config: str, mode: str, batch: int, tokens: int) -> Program:
    """A row of steps_fp32.json: "forward" and, in mode "train", "backward".

    The cache of the allocator is emptied before each pass; gradients are never set to
    zero, so that each backward adds to what is there; the loss itself is not measured.
    """
    measured: dict[str, float] = {}
    is_training = mode == "train"
    with torch.device("meta"):
        model = _language_model(config, is_training).train(is_training)
        ids = torch.empty(batch, tokens, dtype=torch.int64)

    def train(model, ids):
        for _ in range(2):
            torch.cuda.empty_cache()
            with _Seconds(measured, "forward"):
                out = model(ids)
            logits = out[0] if isinstance(out, tuple) else out
            loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
            del out, logits
            with _Seconds(measured, "backward"):
                loss.backward()
            del loss

    def infer(model, ids):
        for _ in range(2):
            torch.cuda.empty_cache()
            with torch.no_grad(), _Seconds(measured, "forward"):
                model(ids)

    return Program(train if is_training else infer, (model, ids), measured)


def _language_model(config: str, is_training: bool) -> torch.nn.Module:
    if config == "bert_large":
        shape = models.BERT_LARGE
        if is_training:
            return models.bert_for_pre_training(shape)
        return models.bert_for_classification(shape)
    kind, shape = _LANGUAGE[config]
    return kind(shape)


# -- resnet50_v100.json ----------------------------------------------------------------


def resnet50_v100() -> Program:
    """The step of resnet50_v100.json: "step", "peak_rise", "allocations".

    Gradients are filled with zeros, and every parameter has its momentum.
    """
    measured: dict[str, float] = {}
    with torch.device("meta"):
        model = models.resnet50()
    host = torch.empty(32, 3, 224, 224), torch.zeros(32, dtype=torch.int64)

    def train(model):
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.001, momentum=0.9, foreach=False
        )
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()
            with _Seconds(measured, "step"):
                images, labels = (tensor.cuda() for tensor in host)
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad(set_to_none=False)
                loss.backward()
                optimizer.step()
            after = torch.cuda.memory_stats()
            peak, now = "allocated_bytes.all.peak", "allocated_bytes.all.current"
            count = "allocation.all.allocated"
            measured["peak_rise"] = after[peak] - before[now]
            measured["allocations"] = after[count] - before[count]
            del images, labels, loss

    return Program(train, (model,), measured)


# -- throughput_dle.json ---------------------------------------------------------------


def throughput_dle(program: str, numbers: str, batch: int) -> Program:
    """A row of throughput_dle.json: "step", the seconds of a batch."""
    if program.startswith("BERT"):
        return _bert_squad(numbers, batch)
    if "train" in program:
        return _resnet_training(numbers, batch)
    return _resnet_evaluation(numbers, batch)


@contextlib.contextmanager
def _computing_in(numbers: str) -> Iterator[None]:
    """The card computes in "float32", "tf32" or, by autocast, "fp16"."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = numbers != "float32"
    try:
        with torch.autocast("cuda", torch.float16, enabled="fp16" in numbers):
            yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def _memory_format(numbers: str) -> torch.memory_format:
    """These programs train in channels_last where they train in float16."""
    return torch.channels_last if "fp16" in numbers else torch.contiguous_format


def _images(batch: int, numbers: str) -> torch.Tensor:
    """Images as the model gets them, on the device of the moment."""
    images = torch.empty(batch, 3, 224, 224)
    return images.contiguous(memory_format=_memory_format(numbers))


def _resnet_training(numbers: str, batch: int) -> Program:
    """SGD with momentum on labels that are smoothed; float16 with a scaled loss."""
    measured: dict[str, float] = {}
    with torch.device("meta"):
        model = models.resnet50().to(memory_format=_memory_format(numbers))
        images = _images(batch, numbers)
        labels = torch.empty(batch, dtype=torch.int64)

    def train(model, images, labels):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.875)
        scaler = torch.amp.GradScaler("cuda", enabled="fp16" in numbers)
        for _ in range(2):
            with _Seconds(measured, "step"):
                with _computing_in(numbers):
                    out = model(images)
                    loss = F.cross_entropy(out, labels, label_smoothing=0.1)
                    scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

    return Program(train, (model, images, labels), measured)


def _resnet_evaluation(numbers: str, batch: int) -> Program:
    measured: dict[str, float] = {}
    with torch.device("meta"):
        model, images = models.resnet50().eval(), _images(batch, numbers)

    def evaluate(model, images):
        for _ in range(2):
            with torch.no_grad(), _computing_in(numbers), _Seconds(measured, "step"):
                model(images)

    return Program(evaluate, (model, images), measured)


def _bert_squad(numbers: str, batch: int) -> Program:
    """Fine-tuning: the place of an answer in 384 tokens; clipping and a fused Adam."""
    measured: dict[str, float] = {}
    shape = models.BERT_LARGE
    with torch.device("meta"):
        model = models.Bert(shape, torch.nn.Linear(shape.width, 2))
        ids = torch.empty(batch, 384, dtype=torch.int64)
        starts, ends = (torch.empty(batch, dtype=torch.int64) for _ in range(2))

    def train(model, ids, starts, ends):
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-5, fused=True)
        scaler = torch.amp.GradScaler("cuda", enabled="fp16" in numbers)
        for _ in range(2):
            with _Seconds(measured, "step"):
                with _computing_in(numbers):
                    first, last = model(ids).unbind(-1)
                    loss = F.cross_entropy(first, starts) + F.cross_entropy(last, ends)
                    scaler.scale(loss / 2).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

    return Program(train, (model, ids, starts, ends), measured)
