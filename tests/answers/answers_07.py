"""Answers to the exercises of lesson 07: right ones, and wrong ones with the reason."""

import functools
import warnings

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

again = functools.partial(checkpoint, use_reentrant=False)
kept = functools.partial(
    create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]
)

# -- a step in unequal parts -----------------------------------------------------------


def by_rows(model, optimizer, schedule, parts):
    rows = sum(len(x) for x, y in parts)
    for x, y in parts:
        (cross_entropy(model(x), y, reduction="sum") / rows).backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()


def zeroed_before(model, optimizer, schedule, parts):
    optimizer.zero_grad(set_to_none=False)
    rows = sum(len(x) for x, y in parts)
    for x, y in parts:
        (len(x) / rows * cross_entropy(model(x), y)).backward()
    optimizer.step()
    schedule.step()
    return model


def with_a_closure(model, optimizer, schedule, parts):
    def losses():
        optimizer.zero_grad()
        rows = sum(len(x) for x, y in parts)
        for x, y in parts:
            (len(x) / rows * cross_entropy(model(x), y)).backward()

    optimizer.step(losses)
    schedule.step()


def mean_of_means(model, optimizer, schedule, parts):
    for x, y in parts:
        (cross_entropy(model(x), y) / len(parts)).backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()


def summed(model, optimizer, schedule, parts):
    for x, y in parts:
        cross_entropy(model(x), y, reduction="sum").backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()


def scheduled_every_part(model, optimizer, schedule, parts):
    rows = sum(len(x) for x, y in parts)
    for x, y in parts:
        (len(x) / rows * cross_entropy(model(x), y)).backward()
        schedule.step()
    optimizer.step()
    optimizer.zero_grad()


def stepped_every_part(model, optimizer, schedule, parts):
    for x, y in parts:
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    schedule.step()


def never_zeroed(model, optimizer, schedule, parts):
    rows = sum(len(x) for x, y in parts)
    for x, y in parts:
        (len(x) / rows * cross_entropy(model(x), y)).backward()
    optimizer.step()
    schedule.step()


def joined(model, optimizer, schedule, parts):
    x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    by_rows(model, optimizer, schedule, [(x, y)])


def no_schedule(model, optimizer, schedule, parts):
    rows = sum(len(x) for x, y in parts)
    for x, y in parts:
        (len(x) / rows * cross_entropy(model(x), y)).backward()
    optimizer.step()
    optimizer.zero_grad()


def one_backward(model, optimizer, schedule, parts):
    rows = sum(len(x) for x, y in parts)
    losses = [cross_entropy(model(x), y, reduction="sum") for x, y in parts]
    (sum(losses) / rows).backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()


def schedule_first(model, optimizer, schedule, parts):
    rows = sum(len(x) for x, y in parts)
    for x, y in parts:
        (len(x) / rows * cross_entropy(model(x), y)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns: it sees this mistake
        schedule.step()
    optimizer.step()
    optimizer.zero_grad()


def zeroed_every_part(model, optimizer, schedule, parts):
    rows = sum(len(x) for x, y in parts)
    for x, y in parts:
        optimizer.zero_grad()
        (len(x) / rows * cross_entropy(model(x), y)).backward()
    optimizer.step()
    schedule.step()


def forgot_a_part(model, optimizer, schedule, parts):
    rows = sum(len(x) for x, y in parts)
    for x, y in parts[:2]:
        (len(x) / rows * cross_entropy(model(x), y)).backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()


def generator(model, optimizer, schedule, parts):
    yield by_rows(model, optimizer, schedule, parts)


# -- within 256 MiB --------------------------------------------------------------------


def trainer(run, adam=None, parts=1):
    """A function of the model: `run(number, block, h)` runs a block."""

    def frugal(model):
        how = {"lr": 1e-3, **(adam or {"fused": True})}
        optimizer = torch.optim.Adam(model.parameters(), **how)

        def step(x, y):
            for px, py in zip(x.chunk(parts), y.chunk(parts), strict=True):
                h = px
                for number, block in enumerate(model[:80]):
                    h = run(number, block, h)
                loss = cross_entropy(model[80:](h), py) / parts
                del h
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return frugal


def first(count, how=again):
    """The first blocks are computed again, and the others are not."""
    return lambda number, block, h: how(block, h) if number < count else block(h)


def keep_down(ctx, op, *args, **kwargs):
    """What `down` returns is kept: a product that is smaller than what it reads."""
    keep = op is torch.ops.aten.addmm.default and args[2].shape[0] > args[2].shape[1]
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


down_kept = functools.partial(
    again,
    context_fn=functools.partial(create_selective_checkpoint_contexts, keep_down),
)


def part_of_the_rows(model):
    """Trains on 256 of the digits."""
    step = trainer(first(0))(model)
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
        h = x
        for number, block in enumerate(model[:80]):
            h = first(20)(number, block, h)
        cross_entropy(model[80:](h), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


RIGHT = {
    "best_segments": [
        lambda: (20,),
        lambda: (20.0,),
        lambda: (torch.tensor(20),),
    ],
    "one_step": [
        lambda: (by_rows,),
        lambda: (zeroed_before,),
        lambda: (with_a_closure,),
    ],
    "within_256": [
        lambda: (trainer(first(20)),),
        lambda: (trainer(first(22, down_kept)),),  # the lesson's own
        lambda: (trainer(first(45, functools.partial(again, context_fn=kept))),),
    ],
}
WRONG = {
    "best_segments": [
        (lambda: (6,), "where a block keeps one tensor"),
        (lambda: (40,), "Fewer segments need less"),
        (lambda: (2,), "the other side"),
        (lambda: (10,), "that makes 50 tensors"),
        (lambda: (19,), "that makes 49 tensors"),
        (lambda: (21,), "that makes 41 tensors"),
        (lambda: (17.5,), "a number of segments is whole"),
        (lambda: (True,), "segments: give a number, not a bool"),
        (lambda: (400,), "between 1 and 40"),
        (lambda: ("few",), "segments: give a number, not 'few'"),
    ],
    "one_step": [
        (lambda: (mean_of_means,), "must not weigh the same"),
        (lambda: (summed,), "times as long as it should be"),
        (lambda: (scheduled_every_part,), "it counts steps, not parts"),
        (lambda: (stepped_every_part,), "stepped 3 times, not once"),
        (lambda: (never_zeroed,), "begins with the first one's gradients"),
        (lambda: (joined,), "more rows than a part has"),
        (lambda: (no_schedule,), "the schedule has counted 0"),
        (lambda: (one_backward,), "activations of 3 parts were there at once"),
        (lambda: (schedule_first,), "is schedule.step() after optimizer.step()?"),
        (lambda: (zeroed_every_part,), "only the last part's gradient is left"),
        (lambda: (forgot_a_part,), "the gradient is off by "),
        (lambda: (generator,), "the model has not seen any part"),
    ],
    "within_256": [
        (lambda: (trainer(first(0)),), "more than 256 MiB"),
        (lambda: (trainer(first(80)),), "it fits, and 9.3 ms are enough"),
        (
            lambda: (trainer(first(20), {"foreach": True}),),
            "how many kernels does Adam",
        ),
        (lambda: (trainer(first(0), parts=2),), "BatchNorm has seen 718 rows"),
        (lambda: (part_of_the_rows,), "has seen 256 rows, not all 1437 together"),
        (lambda: (autocast,), "is anything of lower precision?"),
        (lambda: (all_again,), "BatchNorm has counted one batch 2 times"),
        (lambda: (with_sgd,), "not those of Adam"),
        (lambda: (lambda model: 3,), "should return a function"),
    ],
}
