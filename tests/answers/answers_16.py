"""Answers to the exercises of lesson 16."""

import os
import shutil
import tempfile
from os import fsync, replace
from pathlib import Path

import numpy as np
import torch

SQUARE = (2 * 45 * 40_000 * 3600 / 512) ** 0.5


# -- rows in vain ----------------------------------------------------------------------


def counts(log):
    done, lost = {}, 0
    for entry in log:
        if entry["event"] == "step":
            key = entry["step"], entry["rank"]
            done[key] = len(entry["rows"])
        elif entry["event"] == "loaded":
            for key in [key for key in done if key[0] >= entry["step"]]:
                lost += done.pop(key)
    return lost


def by_difference(log):
    done, every = {}, 0
    for entry in log:
        if entry["event"] == "step":
            every += len(entry["rows"])
            done.setdefault(entry["step"], []).extend(entry["rows"])
        elif entry["event"] == "loaded":
            done = {s: rows for s, rows in done.items() if s < entry["step"]}
    return every - sum(map(len, done.values()))


def counts_steps(log):
    seen, again = set(), 0
    for entry in log:
        if entry["event"] == "step":
            again += (entry["step"], entry["rank"]) in seen
            seen.add((entry["step"], entry["rank"]))
    return again


def for_each_rank(log):
    done, lost = [], 0
    for entry in log:
        if entry["event"] == "step":
            done.append(entry)
        elif entry["event"] == "loaded":
            lost += sum(len(e["rows"]) for e in done if e["step"] >= entry["step"])
            if entry["rank"] == 1:
                done = [e for e in done if e["step"] < entry["step"]]
    return lost


def counts_all(log):
    return sum(len(e["rows"]) for e in log if e["event"] == "step")


def counts_good(log):
    return counts_all(log) - counts(log)


def its_own(log):
    done, lost = {}, 0
    for entry in log:
        if entry["event"] == "step":
            done[entry["step"], entry["rank"]] = len(entry["rows"])
        elif entry["event"] == "loaded":
            for key in list(done):
                if key[0] >= entry["step"] and key[1] == entry["rank"]:
                    lost += done.pop(key)
    return lost


def not_the_last(log):
    last = {(e["step"], e["rank"]): len(e["rows"]) for e in log if e["event"] == "step"}
    return counts_all(log) - sum(last.values())


def repeated(log):
    rows = {(e["step"], r) for e in log if e["event"] == "step" for r in e["rows"]}
    return counts_all(log) - len(rows)


def once_for_ever(log):
    last, rows = {}, {}
    for entry in log:
        if entry["event"] == "step":
            key = entry["step"], entry["rank"]
            if key in rows:
                last[key] = rows[key]
            rows[key] = len(entry["rows"])
    return sum(last.values())


def needs_rows(log):
    return sum(len(e["rows"]) for e in log)


# -- a file that is whole --------------------------------------------------------------


def whole(path, content):
    half = Path(f"{path}.half")
    with open(half, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(half, path)


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
    with open(f"{path}.half", "wb") as file:
        file.write(content)
        os.fsync(file.fileno())
    os.replace(f"{path}.half", path)


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
    with open(f"{path}.half", "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.half", path)


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
    "vain": [
        lambda: (counts,),
        lambda: (by_difference,),
        lambda: (lambda log: np.int64(counts(log)),),
    ],
    "keep": [
        lambda: (whole,),
        lambda: (with_os,),
        lambda: (with_its_own_names,),
        lambda: (with_the_folder,),
        lambda: (syncs_all,),
    ],
    "save_every": [
        lambda: (1677, 1.79),
        lambda: (SQUARE / 3, 9000 / SQUARE),
        lambda: (np.int64(1677), torch.tensor(1.8)),
    ],
}
WRONG = {
    "vain": [
        (lambda: (counts_steps,), "add up their rows"),
        (lambda: (for_each_rank,), "lost only once"),
        (lambda: (counts_all,), "counts all rows"),
        (lambda: (counts_good,), "worth something"),
        (lambda: (once_for_ever,), "both times"),
        (lambda: (needs_rows,), "KeyError"),
        (lambda: (its_own,), "not there any more"),
        (lambda: (not_the_last,), "nobody has done it again"),
        (lambda: (repeated,), "nobody has done it again"),
        (lambda: (lambda log: str(counts(log)),), "give a number, not '14'"),
        (lambda: (lambda log: 1,), "a step has 7 rows"),
    ],
    "keep": [
        (lambda: (plain,), "killed at byte"),
        (lambda: (in_pieces,), "killed at line"),
        (lambda: (removes_first,), "no file of that name"),
        (lambda: (not_synced,), "power cut"),
        (lambda: (synced_too_late,), "power cut"),
        (lambda: (synced_too_early,), "flush() first"),
        (lambda: (stumbles,), "the next call fails (FileExistsError"),
        (lambda: (renames_in_with,), "the file has"),
        (lambda: (leaves,), "is left over"),
        (lambda: (writes_less,), "when the disk took only up to byte"),
        (lambda: (raises,), "OSError: no such luck"),
        (lambda: (another,), "without any kill"),
        (lambda: (moves,), "in another folder"),
        (lambda: (only_long,), "with a content of 5 bytes"),
        (lambda: (None,), "give a function"),
        (lambda: (print,), "give a function"),
    ],
    "save_every": [
        (lambda: (5031, 1.79), "that many seconds"),
        (lambda: (1186, 1.79), "2 under the root"),
        (lambda: (37_947, 1.79), "any of the 512"),
        (lambda: (28, 1.79), "hours and seconds"),
        (lambda: (838, 1.79), "not half"),
        (lambda: (1677, 0.0179), "in percent"),
        (lambda: (1677, 0.894), "add both"),
        (lambda: (1677, 2.68), "half an interval"),
        (lambda: (900, 1.79), "find the seconds"),
        (lambda: (1677, 3.5), "C / T + T / (2 M)"),
        (lambda: (1677, 2), "one digit after the point"),
        (lambda: (1677, 0.02), "in percent"),
        (lambda: ("1677", 1.79), "give a number, not '1677'"),
        (lambda: (torch.ones(2), 1.79), "give a number"),
    ],
}
