"""What the tests of the scripts share: they launch one, import it, and read it."""

import ast
import contextlib
import functools
import gc
import importlib.util
import io
import os
import re
import runpy
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
import torch.distributed as dist

import simgpu
from helpers.processes import MARK, end
from simgpu import RankError, Ranks
from support.limits import JOB

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
SCRIPTS = NOTEBOOKS / "scripts"

sys.path.insert(0, str(NOTEBOOKS))

# -- run -------------------------------------------------------------------------------


@contextlib.contextmanager
def environment(**more: str) -> Iterator[dict[str, str]]:
    """An environment for what a test starts.

    Whatever has it is ended afterwards, also if the test fails. Temporary files are in
    a folder that goes, too.
    """
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, MARK: uuid.uuid4().hex, "TMPDIR": folder, **more}
        try:
            yield environ
        finally:
            end(environ[MARK])


@contextlib.contextmanager
def temporary_folder(folder: Path) -> Iterator[None]:
    """Let a folder be the one for temporary files; nothing may stay in it."""
    with (
        mock.patch.dict(os.environ, TMPDIR=str(folder)),
        mock.patch.object(tempfile, "tempdir", None),
    ):
        yield
    assert os.listdir(folder) == []


@contextlib.contextmanager
def simulated(number: int, *more, **options) -> Iterator[None]:
    """Simulated GPUs in this process, with what `simgpu.start` takes."""
    simgpu.start(number, *more, **options)
    try:
        yield
    finally:
        simgpu.stop()


def launch(name: str, ranks: int, *arguments: str) -> subprocess.CompletedProcess:
    """Run a script in ranks on the CPU, as torchrun does."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(SCRIPTS / name), *arguments]
    with environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="") as environ:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=JOB, env=environ
        )


def in_ranks(name: str, ranks: int, *arguments: str) -> str:
    """Run a script's `main` in ranks on the CPU that have imported PyTorch.

    Its numbers are those of torchrun, for a fraction of the time: there each process
    imports PyTorch for itself. The ranks meet at a file, not at torchrun's store. The
    lessons launch each script with torchrun once, in two ranks. Closes ranks that are
    open.

    Returns:
        What it prints, also as errors, each line behind the number of its rank.
    """
    with tempfile.TemporaryDirectory() as folder, Ranks(ranks, device="cpu") as it:

        def run() -> None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
            dist.destroy_process_group()  # the script makes its own
            group = functools.partial(
                dist.init_process_group,
                store=dist.FileStore(f"{folder}/store", ranks),
                rank=int(os.environ["RANK"]),
                world_size=ranks,
            )
            with mock.patch.object(dist, "init_process_group", group):
                load(name).main(list(arguments))

        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                it.run(run, timeout=JOB)
            except RankError as error:
                raise AssertionError(f"{error}\n{printed.getvalue()}") from error
    return printed.getvalue()


class WarmRanks:
    """Ranks on simulated GPUs that stay, and run one program after another.

    A program's numbers are those that it has under torchrun, without the seconds in
    which its ranks import PyTorch. A program of one process runs in the first of those
    that are there; another number of ranks is started afresh.
    """

    def __init__(self):
        self._ranks: Ranks | None = None
        self._count = 0

    def run(self, script: Path, ranks: int, words: list[str], folder: Path) -> str:
        """What a program prints, started in a folder; also as errors.

        Raises:
            AssertionError: if it fails on a rank.
        """
        if self._ranks is None or ranks not in (1, self._ranks.size):
            self.close()
            with contextlib.redirect_stdout(None):
                self._ranks = Ranks(ranks)
        self._count += 1
        meeting = folder / f"met-{self._count}"
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                self._ranks.run(_be, script, words, meeting, ranks, timeout=JOB)
            except RankError as error:
                self.close()
                raise AssertionError(f"{error}\n{printed.getvalue()}") from error
        return re.sub(r"^\[\d+\] ", "", printed.getvalue(), flags=re.MULTILINE)

    def close(self) -> None:
        """End the ranks."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


def _be(script: Path, words: list[str], meeting: Path, ranks: int) -> None:
    """Be a program, in a rank that has been another one before."""
    if dist.is_initialized():
        dist.destroy_process_group()
    rank = int(os.environ["RANK"])
    if rank >= ranks:
        return
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    group = functools.partial(
        dist.init_process_group,
        store=dist.FileStore(str(meeting), ranks),
        rank=rank,
        world_size=ranks,
    )
    os.chdir(meeting.parent)
    known = set(sys.modules)
    own = os.path.dirname(script)
    try:
        with (
            mock.patch.object(dist, "init_process_group", group),
            mock.patch.object(sys, "argv", [str(script), *words]),
            mock.patch.object(sys, "path", [own, *sys.path]),
        ):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        os.chdir("/")
        for name in set(sys.modules) - known:  # the next one has a `model` of its own
            if os.path.dirname(getattr(sys.modules[name], "__file__", "") or "") == own:
                del sys.modules[name]


# -- jobs ------------------------------------------------------------------------------


def starts(log: list[dict]) -> list[tuple[int, int]]:
    """(ranks, first step) of each time that training began."""
    begun = [e for e in log if e["event"] == "loaded" and e["rank"] == 0]
    return [(entry["ranks"], entry["step"]) for entry in begun]


# -- read ------------------------------------------------------------------------------


def load(name: str) -> ModuleType:
    """The script as a module, from its file."""
    path = SCRIPTS / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text_of(name: str) -> str:
    return (SCRIPTS / name).read_text(encoding="utf-8")


def edited(name: str, edits: dict[str, str], folder: Path) -> Path:
    """A script of this name with other text in places that are there once."""
    text = text_of(name)
    for old, new in edits.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    script = folder / name
    script.write_text(text, encoding="utf-8")
    return script


def last_calls(name: str) -> list[str]:
    """What a script does when it is launched: the calls of its last `if`."""
    return [ast.unparse(line) for line in ast.parse(text_of(name)).body[-1].body]


def prose_of(lesson: str) -> str:
    import nbformat  # not for the ranks of `in_ranks`, which import this file

    notebook = nbformat.read(NOTEBOOKS / lesson, as_version=4)
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    return "\n".join(cells)


def functions_of(text: str) -> dict[str, str]:
    """The source of each function of a program, by its name."""
    nodes = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(text, node) for node in nodes}


def functions_in(lesson: str) -> dict[str, str]:
    """The same for the cells of a lesson."""
    import nbformat

    found = {}
    for cell in nbformat.read(NOTEBOOKS / lesson, as_version=4).cells:
        if cell.cell_type == "code":
            found |= functions_of(cell.source)
    return found


def shown(prose: str, code: str) -> bool:
    """Whether the prose has this code as a block."""
    return f"```python\n{code.strip()}\n```" in prose
