"""Files that changed, and shared memory that nobody has, are found."""

import contextlib
import multiprocessing
import os
import subprocess
import sys
import threading
from multiprocessing.shared_memory import SharedMemory

import pytest

from support.limits import SHORT
from tests.harness import files, usage

pytestmark = pytest.mark.skipif(not usage.MEASURABLE, reason="read from /proc")


def test_files_that_change(tmp_path):
    for name in ("kept", "written", "removed"):
        (tmp_path / name).touch()
    before = files.files(tmp_path)
    (tmp_path / "written").write_text("1")
    (tmp_path / "removed").unlink()
    for folder in ("new", "__pycache__"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "made").touch()
    changed = files.changed(before, files.files(tmp_path))
    names = [path.removeprefix(f"{tmp_path}/") for path in changed]
    assert names == ["new/made", "removed", "written"]


def test_a_semaphore_that_somebody_has():
    lock = multiprocessing.get_context("spawn").Lock()  # with a name, for the child
    path = f"{files.SHARED_MEMORY}/sem.{lock._semlock.name.lstrip('/')}"
    assert os.path.exists(path) and files.unused([path]) == []


def test_shared_memory_that_nobody_has():
    block = SharedMemory(create=True, size=4096)
    path = f"{files.SHARED_MEMORY}/{block.name.lstrip('/')}"
    try:
        assert files.unused([path]) == []
        block.close()
        assert files.unused([path]) == [path]
        left = files.still_unused([path], seconds=0.3)  # the limit is what is tested
        assert left == [path]
        threading.Timer(0.3, block.unlink).start()
        # it was there for a moment only
        assert files.still_unused([path], seconds=SHORT) == []
    finally:
        with contextlib.suppress(FileNotFoundError):
            block.unlink()


def test_shared_memory_of_pytorch_is_left_once_its_process_has_ended(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True, text=True, check=True, timeout=SHORT,
    )  # fmt: skip
    paths = [tmp_path / f"torch_{pid}_1_0" for pid in (os.getpid(), int(ended.stdout))]
    for path in paths:
        path.touch()
    assert files.unused([str(path) for path in paths]) == [str(paths[1])]
