"""Answers to the exercises of lesson 24: right ones, and planted wrong ones."""

import os
import shutil
import tempfile
from os import fsync, replace
from pathlib import Path

import numpy as np
import torch

SQUARE = (2 * 45 * 40_000 * 3600 / 512) ** 0.5


# -- steps done again ------------------------------------------------------------------


def by_remainder(step, every, damaged):
    return min(step, step % every + damaged * every)


def ignores_damage(step, every, damaged):
    return step % every


def before_the_beginning(step, every, damaged):
    return step % every + damaged * every


def goes_on_with(step, every, damaged):
    return step - by_remainder(step, every, damaged)


# -- a file that is whole --------------------------------------------------------------


def whole(path, content, flush=True, mode="wb"):
    with open(f"{path}.half", mode) as file:
        file.write(content)
        if flush:
            file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.half", path)


def with_os(path, content):
    file = os.open(f"{path}.half", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    while content:
        content = content[os.write(file, content) :]
    os.fsync(file)
    os.close(file)
    Path(f"{path}.half").rename(path)


def with_its_own_names(path, content):
    with open(f"{path}.half", "wb") as file:
        file.write(content)
        file.flush()
        fsync(file.fileno())
    replace(f"{path}.half", path)


def with_the_folder(path, content):
    whole(path, content)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def syncs_all(path, content):
    path.with_suffix(".half").write_bytes(content)
    os.sync()
    path.with_suffix(".half").rename(path)


def plain(path, content):
    Path(path).write_bytes(content)


def in_pieces(path, content):
    with open(path, "wb") as file:
        for start in range(0, len(content), 1000):
            file.write(content[start : start + 1000])


def removes_first(path, content):
    half = Path(f"{path}.half")
    half.write_bytes(content)
    os.unlink(path)
    os.rename(half, path)


def not_synced(path, content):
    half = Path(f"{path}.half")
    half.write_bytes(content)
    half.replace(path)


def synced_too_early(path, content):
    whole(path, content, flush=False)


def synced_too_late(path, content):
    Path(f"{path}.half").write_bytes(content)
    os.replace(f"{path}.half", path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def moves(path, content):
    number, name = tempfile.mkstemp()
    with open(number, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    shutil.move(name, path)


def only_long(path, content):
    if len(content) > 1000:
        whole(path, content)


def stumbles(path, content):
    whole(path, content, mode="xb")


def renames_in_with(path, content):
    with open(f"{path}.half", "wb") as file:
        file.write(content[:-1])
        file.write(content[-1:])
        os.fsync(file.fileno())
        os.replace(f"{path}.half", path)


def leaves(path, content):
    folder = Path(path).parent
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.link(file.name, f"{path}.new")
    os.replace(f"{path}.new", path)


def writes_less(path, content):
    file = os.open(f"{path}.half", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(file, content)
    os.fsync(file)
    os.close(file)
    os.replace(f"{path}.half", path)


def raises(path, content):
    raise OSError("no such luck")


def another(path, content):
    Path(path).write_bytes(content[::-1])


RIGHT = {
    "steps_again": [
        by_remainder,
        lambda step, every, damaged: np.int64(by_remainder(step, every, damaged)),
    ],
    "keep": [with_os, with_its_own_names, with_the_folder, syncs_all],
    "save_every": [
        (1677, 1.79),
        (SQUARE / 3, 9000 / SQUARE),
        (np.int64(1677), torch.tensor(1.8)),
    ],
}

WRONG = {
    "steps_again": [
        (ignores_damage, "cannot be loaded"),
        (before_the_beginning, "not before it"),
        (goes_on_with, "the step to go on with, not"),
        (lambda step, every, damaged: step, "can be loaded"),
        (lambda step, every, damaged: -1, "go on with the newest"),
        (lambda step, every, damaged: "2", "give a number, not '2'"),
    ],
    "keep": [
        (plain, "killed at byte"),
        (in_pieces, "killed at line"),
        (removes_first, "no file of that name"),
        (not_synced, "power cut"),
        (synced_too_late, "power cut"),
        (synced_too_early, "flush() first"),
        (stumbles, "the next call fails (FileExistsError"),
        (renames_in_with, "the file has"),
        (leaves, "is left over"),
        (writes_less, "when the disk took only up to byte"),
        (raises, "OSError: no such luck"),
        (another, "without any kill"),
        (moves, "in another folder"),
        (only_long, "with a content of 5 bytes"),
        (None, "give a function"),
        (print, "give a function"),
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
