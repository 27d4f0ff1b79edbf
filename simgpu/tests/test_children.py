"""Launchers behind `python -m simgpu`, and programs that start others as commands."""

import json
import os
import sys
import textwrap
import time
from pathlib import Path

import pytest
from torch.distributed import DistBackendError
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import simgpu
from simgpu import __main__ as runner
from simgpu import _failures as failures
from simgpu import _launchers as commands
from support import programs
from support.ports import free_port

pytestmark = pytest.mark.slow

RANKS = """
    import os, sys, torch
    import torch.distributed as dist

    backend = () if "both" in sys.argv else ("nccl",)  # gloo and NCCL
    dist.init_process_group(*backend)
    rank = dist.get_rank()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    t = torch.ones(1, device="cuda")
    dist.all_reduce(t)
    if "fail" in sys.argv and rank == 1:
        raise ValueError("rank 1 has had enough")
    dist.all_reduce(t)
    words = rank, os.environ["GROUP_RANK"], t.item(), str(t.device)
    words = *words, torch.cuda.device_count(), sys.path[0]
    print(" ".join(map(str, words)) + "\\n", end="", flush=True)  # in one piece
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "ranks.py").write_text(textwrap.dedent(RANKS), encoding="utf-8")
    return tmp_path


def run(folder: Path, *arguments, **environment) -> programs.Done:
    options = {"new_python": True, **environment}
    return programs.simulated(folder, "--gpus", 2, *arguments, **options)


def test_ranks_of_a_launcher_behind_the_command(folder):
    trace = folder / "trace.json"
    done = run(folder, "--nodes", 2, "--timeline", trace, "-m", "torch.distributed.run",
               "--nproc-per-node=4", "ranks.py", "both")  # fmt: skip
    assert done.status == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"{rank} {rank // 2} 16.0 cuda:{rank % 2} 2 {folder}" for rank in range(4)
    ]
    events = json.loads(trace.read_text())["traceEvents"]
    names = [e["name"] for e in events if "all_reduce" in e.get("name", "")]
    assert len(names) >= 8


def test_the_traceback_of_the_rank_that_failed_first_is_the_last_word(folder):
    done = run(folder, "torchrun", "--nproc-per-node=2", "ranks.py", "fail")
    assert done.status == 1
    summary, found, last = done.stderr.rpartition("\nThe first error, of rank 1:\n")
    assert found and "ChildFailedError" in summary
    assert last.startswith("Traceback") and "simgpu" not in last
    assert last.endswith("ValueError: rank 1 has had enough\n")
    # torchrun's summary has it as well; the other says in a line why it ends, if that
    # is not torchrun's doing
    _, _, root = summary.partition("Root Cause")
    assert "ValueError: rank 1 has had enough" in root
    assert "DistBackendError" not in summary


SELF_STARTING = """
    import os, subprocess, sys

    if "LOCAL_RANK" not in os.environ:
        os.environ.update(LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost",
                          MASTER_PORT=sys.argv[1])
        other = subprocess.Popen(
            [sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:]],
            env=os.environ | {"LOCAL_RANK": "1"},
        )
    import torch
    import torch.distributed as dist

    rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", rank=rank, world_size=2)
        t = torch.full((1,), float(rank), device="cuda")
        dist.all_reduce(t)
        print(f"sum {t.item()}\\n", end="", flush=True)
    else:
        print("no GPUs", flush=True)
    if rank == 0:
        sys.exit(other.wait())
    sys.exit(5)
"""


def test_a_program_that_starts_itself_has_the_gpus_in_both(tmp_path):
    path = tmp_path / "starts.py"
    path.write_text(textwrap.dedent(SELF_STARTING), encoding="utf-8")
    done = run(tmp_path, "--children", path, free_port())
    assert done.stdout == "sum 1.0\n" * 2, done.stderr
    assert done.status == 5


CHILDREN = """
    import subprocess, sys

    code = "import sys; print(sys.argv, sys.path, 'torch' in sys.modules)"
    for environ in ({}, {"PYTHONPATH": sys.argv[1]}):
        subprocess.run([sys.executable, "-c", code], check=True)
"""


def test_a_child_without_pytorch_is_left_alone(tmp_path):
    """Its path is what it would be, and the machine's own sitecustomize runs."""
    path = tmp_path / "starts.py"
    path.write_text(textwrap.dedent(CHILDREN), encoding="utf-8")
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('mine')", encoding="utf-8")
    root = str(Path(runner.__file__).parents[1])
    done = programs.simulated(
        tmp_path, "--gpus", 2, "--children", path, own,
        PYTHONPATH=os.pathsep.join((root, str(own))),
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[0] == "mine" and len(lines) == 4, done.stderr
    assert lines[1].endswith("False") and "site'" not in lines[1].split("]")[1]
    assert done.stderr == ""


OTHER_SIMULATOR = """
    import os, subprocess, sys
    first, *rest = os.environ["PYTHONPATH"].split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([first, "other", *rest])
    code = "import torch, simgpu; print(torch.cuda.device_count(), simgpu.__version__)"
    subprocess.run([sys.executable, "-c", code], check=True)
"""


def test_a_child_has_the_simulator_of_the_command_also_beside_another_one(tmp_path):
    path = tmp_path / "starts.py"
    path.write_text(textwrap.dedent(OTHER_SIMULATOR), encoding="utf-8")
    other = tmp_path / "other" / "simgpu"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("__version__ = '0.1'", encoding="utf-8")
    done = programs.simulated(tmp_path, "--gpus", 2, "--children", path)
    assert done.stdout == f"2 {simgpu.__version__}\n", done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("simgpu: the command's simulator is used, ")
    assert line.endswith(f"and not this Python's, {other}")


@pytest.mark.parametrize(
    "package", ["raise ImportError('no library')", "from os import *"]
)
@pytest.mark.parametrize("flags", [(), ("--no-fork",)], ids=str)
def test_nvml_is_the_stand_in_also_if_it_is_imported_before_pytorch(
    tmp_path, flags, package
):
    """Also where PyTorch itself has imported the package before a rank is forked."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "pynvml.py").write_text(package)
    (tmp_path / "ranks.py").write_text(
        "import pynvml\npynvml.nvmlInit()\ncount = pynvml.nvmlDeviceGetCount()\n"
        "import torch\nprint(count, torch.cuda.utilization(0))\n"
    )
    path = os.pathsep.join(
        [str(tmp_path / "packages"), os.environ.get("PYTHONPATH", "")]
    )
    command = (*flags, "torchrun", "--nproc-per-node=1", "ranks.py")
    done = run(tmp_path, *command, PYTHONPATH=path)
    assert done.stdout == "2 0\n", done.stderr


def test_a_child_that_has_no_gpus_is_told_of_once(tmp_path):
    path = tmp_path / "starts.py"
    path.write_text(textwrap.dedent(CHILDREN), encoding="utf-8")
    done = programs.simulated(tmp_path, "--gpus", 2, path, "x")
    assert done.status == 0 and len(done.stdout.splitlines()) == 2
    assert done.stderr.count("python -m simgpu --children hands them down") == 1


def test_the_command_is_found_beside_this_python_or_on_the_path(tmp_path, monkeypatch):
    for name in ("python", "tool", "torchrun"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert commands.find_command("torchrun") == [str(tmp_path / "torchrun")]
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commands.find_command("tool") == [str(tmp_path / "tool")]
    assert commands.find_command("missing") is None


def failed(error: Exception, folder: Path) -> list[str]:
    """What is shown of an error that ends a rank."""
    shown = []
    try:
        raise error
    except Exception:
        kind, value, trace = sys.exc_info()
        failures.report(
            kind, value, trace, lambda *_: shown.append("a traceback"), str(folder)
        )
    return shown


def test_a_rank_tells_torchrun_and_the_command_why_it_fails(
    tmp_path, monkeypatch, capsys
):
    left, told = tmp_path / "left", tmp_path / "error.json"
    left.mkdir()
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(told))
    assert failed(ValueError("too bad"), left) == ["a traceback"]
    failure = ProcessFailure(local_rank=2, pid=1, exitcode=1, error_file=str(told))
    assert failure.message["extraInfo"]["py_callstack"].endswith("ValueError: too bad")
    words = told.read_text()
    assert failed(KeyError("again"), left) and told.read_text() == words
    failures.show_first(left)
    assert "The first error, of rank 2:\nTraceback" in capsys.readouterr().err


def test_a_rank_that_waited_for_a_failed_one_says_so_in_a_line(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    words = "rank 0: broadcast waits for rank 1, which has ended with an error."
    before = time.time()
    assert failed(DistBackendError(words), tmp_path) == []
    assert capsys.readouterr().err == words + "\n"
    failure = ProcessFailure(0, 1, 1, str(tmp_path / "error.json"))
    assert failure.timestamp >= before  # whole seconds: not before who failed first
    assert failed(DistBackendError("rank 1, which has ended."), tmp_path)


def test_of_several_failures_the_first_is_shown(tmp_path, capsys):
    for name, order, text in (
        ("1", (0, False, 1.0), "before the restart"),
        ("2", (-1, True, 2.0), "waits for another"),
        ("3", (-1, False, 4.0), "later"),
        ("4", (-1, False, 3.0), "this one"),
    ):
        (tmp_path / name).write_text(json.dumps((order, f"rank {name}", text)))
    failures.show_first(tmp_path)
    assert capsys.readouterr().err == "\nThe first error, of rank 4:\nthis one\n"
