"""Answers to the exercises of lesson 24: right ones, and planted wrong ones."""

from ast import literal_eval

import numpy as np
import torch

SQUARE = (2 * 45 * 40_000 * 3600 / 512) ** 0.5


# -- steps done again ------------------------------------------------------------------


def by_remainder(step, every, damaged):
    return min(step, step % every + damaged * every)


# -- a checkpoint without a rename -----------------------------------------------------


def put_parts(store, step, parts):
    for name, content in parts.items():
        store.put(f"{step:06}/{name}", content)


def clear(store, step):
    for name in store.names():
        if not name.startswith(f"{step:06}/"):
            store.delete(name)


def by_marker(store, step, parts):
    """A marker for each step; the parts of a killed attempt go first."""
    for name in store.names():
        if name.startswith(f"{step:06}/"):
            store.delete(name)
    put_parts(store, step, parts)
    store.put(f"{step:06}/complete", b"")
    clear(store, step)


def of_marker(store):
    whole = [name for name in store.names() if name.endswith("/complete")]
    if not whole:
        return 0, {}
    folder = max(whole).split("/")[0]
    names = [name.split("/") for name in store.names()]
    return int(folder), {
        part: store.get(f"{place}/{part}")
        for place, part in names
        if place == folder and part != "complete"
    }


def in_one_object(store, step, parts):
    store.put("all", repr((step, parts)).encode())


def of_one_object(store):
    return literal_eval(store.get("all").decode()) if store.names() else (0, {})


def marker_first(store, step, parts):
    store.put(f"{step:06}/complete", b"")
    put_parts(store, step, parts)
    clear(store, step)


def no_marker(store, step, parts):
    put_parts(store, step, parts)
    clear(store, step)


def of_names(store):
    if not store.names():
        return 0, {}
    step = int(max(store.names())[:6])
    mine = [name for name in store.names() if name.startswith(f"{step:06}/")]
    return step, {name[7:]: store.get(name) for name in mine}


def old_goes_first(store, step, parts):
    for name in store.names():
        store.delete(name)
    put_parts(store, step, parts)
    store.put(f"{step:06}/complete", b"")


def keeps_leftovers(store, step, parts):
    put_parts(store, step, parts)
    store.put(f"{step:06}/complete", b"")
    clear(store, step)


def keeps_all(store, step, parts):
    put_parts(store, step, parts)
    store.put(f"{step:06}/complete", b"")


def deletes_what_was_there(store, step, parts):
    before = store.names()
    put_parts(store, step, parts)
    store.put(f"{step:06}/complete", b"")
    for name in before:
        store.delete(name)


def raises(store, step, parts):
    raise OSError("no such luck")


RIGHT = {
    "steps_again": [
        by_remainder,
        lambda step, every, damaged: np.int64(by_remainder(step, every, damaged)),
    ],
    "checkpoint_without_rename": [(by_marker, of_marker)],
    "save_every": [
        (1677, 1.79),
        (SQUARE / 3, 9000 / SQUARE),
        (np.int64(1677), torch.tensor(1.8)),
    ],
}

WRONG = {
    "steps_again": [
        (lambda step, every, damaged: step % every, "cannot be loaded"),
        (lambda step, every, damaged: step % every + damaged * every, "not before it"),
        (
            lambda step, every, damaged: step - by_remainder(step, every, damaged),
            "the step to go on with, not",
        ),
        (lambda step, every, damaged: step, "can be loaded"),
        (lambda step, every, damaged: -1, "go on with the newest"),
        (lambda step, every, damaged: "2", "give a number, not '2'"),
    ],
    "checkpoint_without_rename": [
        ((marker_first, of_marker), "killed before call 2 of a save of step 15"),
        ((no_marker, of_names), "find gives step 15 with {'rank 0'"),
        ((old_goes_first, of_marker), "find gives step 0, not 10 or 15"),
        ((keeps_leftovers, of_marker), "started again with 2 ranks"),
        ((deletes_what_was_there, of_marker), "started again with 2 ranks"),
        ((in_one_object, of_one_object), "an object of its own"),
        ((keeps_all, of_marker), "the old part '000005/rank 0' is still there"),
        ((raises, of_marker), "OSError: no such luck"),
        ((by_marker, lambda store: 7), "not a step and its parts"),
        ((print, None), "give a function"),
    ],
    "save_every": [
        ((5031, 1.79), "that many seconds"),
        ((1186, 1.79), "2 under the root"),
        ((37_947, 1.79), "any of the 512"),
        ((28, 1.79), "hours and seconds"),
        ((838, 1.79), "not half"),
        ((1677, 0.0179), "in percent"),
        ((1677, 0.894), "add both"),
        ((1677, 2.68), "half an interval"),
        ((900, 1.79), "find the seconds"),
        ((1677, 3.5), "C / T + T / (2 M)"),
        ((1677, 2), "one digit after the point"),
        ((1677, 0.02), "in percent"),
        (("1677", 1.79), "give a number, not '1677'"),
        ((torch.ones(2), 1.79), "give a number"),
    ],
}
