"""The pages of the project: its programs print what they say, its links lead on."""

import inspect
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import simgpu
from support import checkout
from support.limits import JOB

PROJECT = Path(__file__).resolve().parents[1]
NAMES = "README HOW-IT-WORKS WHAT-RUNS ADD-A-CARD FIGURES CHANGELOG"
PAGES = [PROJECT / f"{name}.md" for name in NAMES.split()]
PAGE = (PROJECT / "README.md").read_text(encoding="utf-8")
FILES = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL)
CONSOLE = re.findall(r"```console\n\$ (.*?)\n(.*?)```", PAGE, re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([\w-]+))?\)")
WEB = re.compile(r"https?://")
# a file or folder named in code: `_timing/cost.py`, `tests/`
NAMED = re.compile(r"`((?:[\w.-]+/)+(?:[\w.-]+\.\w+)?)`")
PROGRAMS = {
    "python": [sys.executable],
    "simgpu": [sys.executable, "-m", "simgpu"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES:
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_each_file_is_used():
    last = [shlex.split(command)[-1] for command, _ in CONSOLE]
    used = {word for words in last for word in words.split() if word.endswith(".py")}
    assert {name for name, _ in FILES} == used


def test_each_list_of_the_cards_has_them_all():
    (listed,) = re.findall(r"^\* `--card` chooses .*$", PAGE, re.M)
    lists = {"README.md, --card": listed}
    for public in (simgpu.start, simgpu.run_ranks, simgpu.Ranks):
        lists[f"docstring of simgpu.{public.__name__}"] = inspect.getdoc(public)
    missing = {
        where: lacks
        for where, text in lists.items()
        if (lacks := [n for n in simgpu.CARDS if not re.search(rf"\b{n}\b", text)])
    }
    assert missing == {}


def refused_names() -> set[str]:
    """What raises `NotSimulated`, of all that has a name: "torch.cuda.CUDAGraph"."""
    from simgpu import _patches, _runtime
    from simgpu._distributed import checks, functional, nccl, operations

    names = {f"ProcessGroupNCCL.{name}" for name in nccl._LEFT_OUT}
    simgpu.start(1)
    try:
        table = _patches.table(_runtime.current())
    finally:
        simgpu.stop()
    names |= {
        f"{p.owner.__name__}.{p.name}" for p in table if p.reason == "not simulated"
    }
    apart = {"send", "recv_", "check_for_nan"} | set(checks._ABSENT)
    known = {
        "c10d": {*operations._READERS, *apart},
        "_c10d_functional": set(functional._RUN),
    }
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        takes = {argument.name for argument in schema.arguments}
        if space in known and takes & {"process_group", "group_name"}:
            if not {name, name.replace("_coalesced", "")} & known[space]:
                names.add(schema.name)
    for file in checkout.files(Path(simgpu.__file__).parent, "*.py"):
        for call in re.findall(
            r"NotSimulated\(\s*\"([\w.]+\.\w+)\"", file.read_text(encoding="utf-8")
        ):
            names.add(call)
    return names


def test_what_runs_lists_every_name_that_is_refused():
    page = (PROJECT / "WHAT-RUNS.md").read_text(encoding="utf-8")
    told = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", page))))
    missing = {n for n in refused_names() if re.split(r"\.|::", n)[-1] not in told}
    assert missing == set()


@pytest.mark.slow
@pytest.mark.parametrize(("command", "shown"), CONSOLE, ids=[c for c, _ in CONSOLE])
def test_a_command_prints_what_the_page_says(folder, command, shown):
    program, *rest = shlex.split(command)
    # options of the pytest that runs this are not for one that the page starts
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    done = subprocess.run(
        [*PROGRAMS[program], *rest], cwd=folder, env=clean | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=JOB,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    if "pytest" in command:  # it adds dots and seconds
        assert printed[-1].startswith(shown.strip()), done.stdout
    else:
        assert printed == shown.splitlines()


def test_one_rank_prints_what_four_do(folder, simulated_gpus, monkeypatch, capsys):
    (shown,) = (shown for command, shown in CONSOLE if "=4" in command)
    rank = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}  # any that is free
    for name, value in {**rank, **meeting}.items():
        monkeypatch.setenv(name, str(value))
    runpy.run_path(str(folder / "ranks.py"))
    assert capsys.readouterr().out == shown


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links, as GitHub does."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere_inside_the_project(page):
    wrong = []
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if WEB.match(target):
            continue
        file = (page.parent / target).resolve() if target else page
        inside = file.is_relative_to(PROJECT) and file.exists()
        if not inside or (anchor and anchor not in anchors(file)):
            wrong.append(f"{target}#{anchor}")
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page):
    text = page.read_text(encoding="utf-8")
    source = PROJECT / "src" / "simgpu"
    there = (PROJECT, source)
    wrong = {n for n in NAMED.findall(text) if not any((f / n).exists() for f in there)}
    assert wrong == set()
