"""`python3 -m helpers lab` and `test`, on good ground and on bad, without a network.

The commands run in small copies of the course whose only requirement is a package
made on the spot, so a set-up takes seconds. What this leaves out: the real
requirements, which running this very suite has installed, and Windows.
"""

import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import psutil
import pytest

from helpers import __main__ as commands

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 60  # that no subprocess of these tests may take

# A stand-in for JupyterLab and for pytest: says how it was called.
TELL = """\
import os, sys
print("called", __name__, sys.argv[1:], os.getcwd(), flush=True)
print("env", os.environ["VIRTUAL_ENV"], os.environ.get("PYTHONPATH"), flush=True)
"""
STAND_INS = {
    "pytest/__init__.py": "",
    "pytest/__main__.py": TELL + "sys.exit(5)",
    "nbformat/__init__.py": "",
    "nbformat/sign.py": """\
import pathlib, sys
pathlib.Path("signed").write_text(sys.argv[1])
""",
    "jupyterlab/__init__.py": "",
    "jupyterlab/__main__.py": TELL
    + """
import time
if "--stay" in sys.argv:
    try:
        print("staying", flush=True)
        time.sleep(100)
    except KeyboardInterrupt:
        pass
""",
}


def write_wheel(folder: Path, name: str, files: dict[str, str]) -> str:
    """Write a package that pip can install without an index; return its file name."""
    info = f"{name}-1.0.dist-info"
    meta = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**files, **meta}.items():
            archive.writestr(path, text)
    return wheel.name


def copy_course(folder: Path) -> Path:
    """Make a small course: the commands, one requirement and a first notebook."""
    (folder / "notebooks").mkdir(parents=True)
    (folder / "helpers").mkdir()
    for name in ("__init__.py", "__main__.py", "pyproject.toml"):
        shutil.copy(ROOT / "helpers" / name, folder / "helpers")
    (folder / "notebooks" / "00-start-here.ipynb").write_text("{}")
    wheel = write_wheel(folder, "stand_ins", STAND_INS)
    (folder / "requirements.txt").write_text(f"./{wheel}\n")
    return folder


def environment(**changes: str) -> dict[str, str]:
    """An environment in which pip sees no configuration and no index."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))}
    return {**env, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", **changes}


def run(
    course: Path,
    *arguments: str,
    cwd: Path | None = None,
    python: str = sys.executable,
    **changes: str,
) -> subprocess.CompletedProcess[str]:
    """Run `python3 -m helpers …` in a copy of the course."""
    return subprocess.run(
        [python, "-m", "helpers", *arguments],
        cwd=cwd or course,
        env=environment(**changes),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=SECONDS,
    )


@contextlib.contextmanager
def started(course: Path, *arguments: str):
    """Start `python3 -m helpers …` as the leader of a process group; kill the group."""
    process = subprocess.Popen(
        [sys.executable, "-m", "helpers", *arguments],
        cwd=course,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
        preexec_fn=None if os.name == "nt" else _hear_ctrl_c,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=SECONDS)


def _hear_ctrl_c() -> None:
    """Who runs the tests in the background has told all children to ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def group(leader: int) -> list[psutil.Process]:
    """The processes that still run in a process group."""
    alive = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == leader:
                alive.append(process)
    return [p for p in alive if p.info["status"] != psutil.STATUS_ZOMBIE]


def read_until(process: subprocess.Popen[str], words: str) -> None:
    """Read a process's stdout up to the line with these words."""
    for line in process.stdout:
        if words in line:
            return
    raise AssertionError(f"{words!r} never came: {process.stderr.read()}")


def sentence(result: subprocess.CompletedProcess[str], status: int = 1) -> str:
    """Check that a command failed with one line on stderr; return the line."""
    assert result.returncode == status, result
    (line,) = result.stderr.splitlines()
    return line


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Path:
    """A course that is set up, in a folder with a space and an umlaut."""
    course = copy_course(tmp_path_factory.mktemp("commands") / "Kurs für alle")
    first = run(course, "test")
    assert first.returncode == 5, first
    assert "Making .venv" in first.stdout
    assert "Installing" in first.stdout
    return course


@pytest.fixture
def bare(tmp_path, monkeypatch) -> Path:
    """A course without .venv; the functions in `commands` work on it."""
    course = copy_course(tmp_path / "course")
    venv = course / ".venv"
    monkeypatch.setattr(commands, "ROOT", course)
    monkeypatch.setattr(commands, "REQUIREMENTS", course / "requirements.txt")
    monkeypatch.setattr(
        commands, "FIRST_NOTEBOOK", course / "notebooks" / "00-start-here.ipynb"
    )
    monkeypatch.setattr(commands, "VENV", venv)
    monkeypatch.setattr(commands, "BUILT_FROM", venv / ".built-from")
    monkeypatch.setattr(commands, "LOCK", venv / ".lock")
    return course


# --- Good ground ----------------------------------------------------------------


def test_second_start_is_quick_and_passes_on_arguments_and_status(course):
    before = time.perf_counter()
    result = run(course, "test", "-k", "two words")
    seconds = time.perf_counter() - before
    assert result.returncode == 5, result
    called, env = result.stdout.splitlines()
    assert called == f"called __main__ {['-k', 'two words']} {course}"
    assert env == f"env {course / '.venv'} None"
    assert seconds < 2


def test_lab_opens_the_first_notebook_on_loopback_with_a_token(course):
    result = run(course, "lab", "--no-browser")
    assert result.returncode == 0, result
    assert f"--ServerApp.root_dir={course}" in result.stdout
    assert "--LabApp.default_url=/lab/tree/notebooks/00-start-here.ipynb" in (
        result.stdout
    )
    assert "--ServerApp.ip=127.0.0.1" in result.stdout
    assert "token" not in result.stdout
    assert result.stdout.index("'--no-browser'") > result.stdout.index("root_dir")
    assert (course / "signed").read_text() == str(
        course / commands.FIRST_NOTEBOOK.relative_to(ROOT)
    )


def test_lab_opens_where_the_lessons_cannot_be_signed(course):
    (course / "signed").unlink(missing_ok=True)
    (course / "signed").mkdir()  # where the stand-in would write
    result = run(course, "lab")
    (course / "signed").rmdir()
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.index("cannot be signed") < result.stdout.index("called")


def test_lab_leaves_the_address_to_a_reader_who_gives_one(course):
    result = run(course, "lab", "--ip=127.0.0.2")
    assert "'--ip=127.0.0.2'" in result.stdout
    assert "127.0.0.1" not in result.stdout


def test_works_from_another_folder(course, tmp_path):
    result = run(course, "test", cwd=tmp_path, PYTHONPATH=str(course))
    alone = (os.cpu_count() or 1) == 1
    shared_out = [] if alone else ["-n", str(commands.WORKERS)]
    assert result.stdout.splitlines()[0] == f"called __main__ {shared_out} {course}"


def test_no_command_and_help_and_unknown_command(course):
    for arguments in ([], ["--help"], ["-h"]):
        result = run(course, *arguments)
        assert result.returncode == 0
        assert all(name in result.stdout for name in commands.COMMANDS)
    result = run(course, "labb")
    assert result.returncode == 2
    assert "'labb'" in result.stderr and "usage:" in result.stderr


def test_check_asks_for_a_lesson_and_says_what_its_exercises_say(course):
    result = run(course, "check")
    assert result.returncode == 2 and "required: NN" in result.stderr
    (course / "helpers" / "solved.py").write_text(
        "import sys; print('called', *sys.argv[1:]); sys.exit(1)"
    )
    result = run(course, "check", "03")
    assert result.stdout.splitlines()[-1] == "called 03" and result.returncode == 1


def test_changed_requirements_are_installed(course):
    wheel = write_wheel(course, "late_wish", {"late_wish.py": ""})
    with open(course / "requirements.txt", "a") as file:
        file.write(f"./{wheel}\n")
    changed = run(course, "test")
    assert "late" in changed.stdout and "Making .venv" not in changed.stdout
    assert "Installing" not in run(course, "test").stdout


def test_another_python_or_folder_builds_anew(bare, monkeypatch):
    want = commands.wanted()
    monkeypatch.setattr(sys.implementation, "cache_tag", "cpython-399")
    assert commands.wanted()[0] != want[0]
    monkeypatch.undo()
    assert commands.wanted()[0] != want[0], "the folder is not looked at"


# --- Interrupted and simultaneous starts ----------------------------------------


@pytest.mark.parametrize("line", ["Making .venv", "Processing"])
def test_killed_set_up_is_repaired(tmp_path, line):
    course = copy_course(tmp_path / "course")
    with started(course, "test") as process:
        read_until(process, line)  # leaving the block kills it
    assert not (course / ".venv" / ".built-from").exists()
    result = run(course, "test")
    assert result.returncode == 5, result
    assert "Making .venv" in result.stdout


@pytest.mark.parametrize("lost", ["pyvenv.cfg", commands.VENV_BIN.name])
def test_broken_venv_is_rebuilt(course, lost):
    path = course / ".venv" / lost
    path.unlink() if path.is_file() else shutil.rmtree(path)
    result = run(course, "test")
    assert result.returncode == 5, result
    assert "Making .venv" in result.stdout


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_two_starts_take_turns_even_if_the_first_is_killed(tmp_path):
    course = copy_course(tmp_path / "course")
    with started(course, "test") as first:
        read_until(first, "Making .venv")
        with started(course, "test") as second:
            read_until(second, "Waiting for it")
            os.kill(first.pid, signal.SIGKILL)  # its venv step goes on, as an orphan
            read_until(second, "called __main__")
            assert second.wait(SECONDS) == 5
    assert "Making" not in run(course, "test").stdout


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("to_all", [True, False], ids=["terminal", "kill"])
def test_ctrl_c_in_the_lab_is_quiet_and_leaves_nothing(course, to_all):
    with started(course, "lab", "--stay") as process:
        read_until(process, "staying")
        if to_all:  # as a terminal does it
            os.killpg(process.pid, signal.SIGINT)
        else:
            os.kill(process.pid, signal.SIGTERM)
        assert process.wait(SECONDS) == (130 if to_all else 143)
        assert group(process.pid) == []
        assert process.stderr.read() == ""


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_during_set_up_is_quiet(tmp_path):
    course = copy_course(tmp_path / "course")
    with started(course, "test") as process:
        read_until(process, "Making .venv")
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(SECONDS) == 130
        assert process.stderr.read() == ""


# --- Bad ground -----------------------------------------------------------------


def old_python() -> str | None:
    """Find an interpreter that is too old for the course."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [shutil.which(f"python3.{minor}") for minor in (8, 9, 7, 6)]
    found += sorted(map(str, pyenv.glob("versions/3.[6-9].*/bin/python3")))
    for python in filter(None, found):
        ask = "import sys; sys.exit(not (3, 6) <= sys.version_info < (3, 10))"
        if subprocess.run([python, "-c", ask], capture_output=True).returncode == 0:
            return python
    return None


def test_old_python_is_turned_away(tmp_path):
    python = old_python()
    if python is None:
        pytest.skip("no Python older than 3.10 here")
    course = copy_course(tmp_path / "course")
    said = sentence(run(course, "lab", python=python))
    assert said.startswith("Python 3.10 or newer is needed, this is 3.")
    assert not (course / ".venv").exists()


def test_unreachable_index(tmp_path):
    course = copy_course(tmp_path / "course")
    requirements = course / "requirements.txt"
    good = requirements.read_text()
    requirements.write_text("torch\n")
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_RETRIES": "1"}
    result = run(course, "test", PIP_NO_INDEX="0", **nowhere)
    assert "package index could not be reached" in sentence(result)
    assert "run this again" in result.stderr
    requirements.write_text(good)
    assert run(course, "test").returncode == 5


def test_requirement_that_nobody_has(course):
    requirements = course / "requirements.txt"
    good = requirements.read_text()
    requirements.write_text("no-such-package\n")
    said = sentence(run(course, "test"))
    assert "No matching distribution found for no-such-package" in said
    requirements.write_text(good)
    assert run(course, "test").returncode == 5


@pytest.mark.parametrize("missing", ["venv", "ensurepip"])
def test_python_without_venv(bare, monkeypatch, capsys, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    assert commands.main(["test"]) == 1
    said = capsys.readouterr().err
    assert "sudo apt install python3-venv" in said and missing in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("step", ["venv", "pip"])
def test_disk_full_in_a_step(bare, monkeypatch, capsys, step):
    def fails(command, lock):
        full = f"ERROR: OSError: [Errno {errno.ENOSPC}] No space left on device\n"
        return (1, full) if step in command else (0, "")

    monkeypatch.setattr(commands, "run_step", fails)
    assert commands.main(["test"]) == 1
    assert capsys.readouterr().err == commands.DISK_IS_FULL + "\n"
    assert not commands.BUILT_FROM.exists()


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "No space"), (errno.EROFS, "not allowed"), (errno.EIO, "/place")],
)
def test_operating_system_refuses(bare, monkeypatch, capsys, number, words):
    def refuses(*_, **__):
        raise OSError(number, os.strerror(number), "/place")

    monkeypatch.setattr(Path, "mkdir", refuses)
    assert commands.main(["test"]) == 1
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


@pytest.mark.skipif(
    os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere"
)
def test_read_only_folder(tmp_path):
    course = copy_course(tmp_path / "course")
    course.chmod(0o555)
    try:
        assert "not allowed" in sentence(run(course, "lab"))
    finally:
        course.chmod(0o755)


@pytest.mark.parametrize("form", ["--port {}", "--port={}", "--ServerApp.port={}"])
def test_port_that_is_taken(course, form):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = run(course, "lab", *form.format(port).split())
    assert sentence(result).startswith(f"Port {port} cannot be used")
    assert "called" not in result.stdout


def test_first_notebook_missing(tmp_path):
    course = copy_course(tmp_path / "course")
    (course / "notebooks" / "00-start-here.ipynb").unlink()
    assert "00-start-here.ipynb is missing" in sentence(run(course, "lab"))
    assert not (course / ".venv").exists()


def test_continuous_integration_runs_the_command_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text()
    assert script.splitlines()[-1] == "python3 -m helpers test"
