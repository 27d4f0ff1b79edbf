"""Answers to the exercises of lesson 10: right ones, and planted wrong ones."""

import warnings

import torch
from torch.nn.functional import cross_entropy

from exercises.lesson_10 import again, segments_of, trainer

# -- what to try first -----------------------------------------------------------------

CHECK = "checkpoint"


def first(job, other):
    """Right answers but for one job."""
    answers = [CHECK, "loss in parts", "accumulate", "more GPUs", CHECK]
    answers[job - 1] = other
    return tuple(answers)


# -- a step in unequal parts -----------------------------------------------------------


def in_parts(
    *end,
    begin=(),
    each=("backward",),
    share=lambda samples, all_samples, parts: samples / all_samples,
    most=None,
):
    """A step: what comes first, what for each of `most` parts, and what at the end.

    `share` is the factor of a part's mean loss.
    """

    def step(model, optimizer, schedule, parts):
        all_samples = sum(len(x) for x, y in parts)
        actions = {
            "step": optimizer.step,
            "zero": optimizer.zero_grad,
            "schedule": schedule.step,
        }
        for action in begin:
            actions[action]()
        for x, y in parts[:most]:
            for action in each:
                if action == "backward":
                    times = share(len(x), all_samples, len(parts))
                    (times * cross_entropy(model(x), y)).backward()
                else:
                    actions[action]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns of a schedule too early
            for action in end:
                actions[action]()

    return step


END = ("step", "zero", "schedule")

by_samples = in_parts(*END)


def with_a_closure(model, optimizer, schedule, parts):
    def losses():
        optimizer.zero_grad()
        rows = sum(len(x) for x, y in parts)
        for x, y in parts:
            (len(x) / rows * cross_entropy(model(x), y)).backward()

    optimizer.step(losses)
    schedule.step()


def joined(model, optimizer, schedule, parts):
    x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    by_samples(model, optimizer, schedule, [(x, y)])


def one_backward(model, optimizer, schedule, parts):
    rows = sum(len(x) for x, y in parts)
    losses = [cross_entropy(model(x), y, reduction="sum") for x, y in parts]
    (sum(losses) / rows).backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()


def generator(model, optimizer, schedule, parts):
    yield by_samples(model, optimizer, schedule, parts)


def part_of_the_samples(model):
    """Trains on 256 of the samples."""
    step = trainer(segments_of(0, 0))(model)
    return lambda x, y: step(x[:256], y[:256])


def autocast(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

    def step(x, y):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def all_again(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

    def step(x, y):
        x = x.clone().requires_grad_()
        cross_entropy(again(model, x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_sgd(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(x, y):
        cross_entropy(segments_of(20, 1)(model, x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


RIGHT = {
    "try_first": [(" Checkpoint", "LOSS IN PARTS", "accumulate", "more gpus", CHECK)],
    "one_step": [
        by_samples,
        in_parts("step", "schedule", begin=["zero"]),
        with_a_closure,
    ],
    "within_32": [trainer(segments_of(20, 1)), trainer(segments_of(20, 2))],
}

WRONG = {
    "try_first": [
        (first(1, "accumulate"), "1 is not accumulate: BatchNorm would see parts"),
        (first(1, "offload"), "1 is not offload: copies cost more"),
        (first(2, "checkpoint"), "it stands at the logits"),
        (first(2, "accumulate"), "a batch of one sample has no parts"),
        (first(3, "checkpoint"), "cost next to nothing"),
        (first(4, "checkpoint"), "take 4 x 52 GB"),
        (first(5, "loss in parts"), "with 10 classes the logits"),
        (first(5, "more GPUs"), "the layers' activations fill the card"),
        (first(2, "smaller batch"), 'number 2: answer with one of "accumulate"'),
        ((CHECK, CHECK), "5 answers are asked for, not 2"),
    ],
    "one_step": [
        (
            in_parts(*END, share=lambda n, every, parts: 1 / parts),
            "must not weigh the same",
        ),
        (
            in_parts(*END, share=lambda n, every, parts: n),
            "times as long as it should be",
        ),
        (
            in_parts("step", "zero", each=["backward", "schedule"]),
            "it counts steps, not parts",
        ),
        (
            in_parts("schedule", each=["backward", "step", "zero"]),
            "stepped 3 times, not once",
        ),
        (in_parts("step", "schedule"), "begins with the first one's gradients"),
        (joined, "more samples than a part has"),
        (in_parts("step", "zero"), "the schedule has counted 0"),
        (one_backward, "activations of 3 parts were there at once"),
        (
            in_parts("schedule", "step", "zero"),
            "is schedule.step() after optimizer.step()?",
        ),
        (
            in_parts("step", "schedule", each=["zero", "backward"]),
            "only the last part's gradient is left",
        ),
        (in_parts(*END, most=2), "the gradient is off by "),
        (generator, "the model has not seen any part"),
    ],
    "within_32": [
        (trainer(segments_of(0, 0)), "more than 32 MiB"),
        (trainer(segments_of(40, 40)), "more than 32 MiB"),
        (trainer(segments_of(40, 5)), "it fits, and 4.5 ms are enough"),
        (trainer(segments_of(20, 1), {"foreach": True}), "how many kernels does Adam"),
        (trainer(segments_of(0, 0), parts=2), "BatchNorm has seen 1024 samples"),
        (part_of_the_samples, "has seen 256 samples, not all 2048 together"),
        (autocast, "is anything of lower precision?"),
        (all_again, "BatchNorm has counted one batch 2 times"),
        (with_sgd, "not those of Adam"),
        (lambda model: 3, "should return a function"),
    ],
}
