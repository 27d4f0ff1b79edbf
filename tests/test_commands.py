"""`python3 -m helpers lab`, `test` and their like, on good ground and on bad.

The commands run in small copies of the course whose only requirement is a package
made on the spot, so a set-up takes seconds and no network. What this leaves out: the
real requirements, which running this very suite has installed, and Windows.
"""

import contextlib
import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from helpers import __main__ as commands
from support.limits import INSTALL
from support.waiting import wait

ROOT = Path(__file__).resolve().parents[1]
COPIED = ["helpers/__init__.py", "helpers/__main__.py", "simgpu/pyproject.toml"]
NOWHERE = {"PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_RETRIES": "1"}
NOWHERE["PIP_NO_INDEX"] = "0"
posix = pytest.mark.skipif(os.name == "nt", reason="POSIX signals")

# Stand-ins for JupyterLab and for pytest: they say how they were called.
TELL = """\
import os, sys, time
print("called", __name__, sys.argv[1:], os.getcwd(), flush=True)
print("env", os.environ["VIRTUAL_ENV"], os.environ.get("PYTHONPATH"), flush=True)
"""
STAND_INS = {
    "pytest.py": TELL + "sys.exit(5)",
    "nbformat/sign.py": "import sys; open('signed', 'w').write(sys.argv[1])",
    "jupyterlab.py": TELL
    + """
if "--stay" in sys.argv:
    try:
        print("staying", os.getpid(), flush=True)
        time.sleep(100)
    except KeyboardInterrupt:
        pass
""",
}


def write_wheel(folder: Path, name: str, files: dict[str, str]) -> str:
    """Write a package that pip can install without an index; return its requirement."""
    wheel = f"{name}-1.0-py3-none-any.whl"
    meta = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(folder / wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        for path, text in meta.items():
            archive.writestr(f"{name}-1.0.dist-info/{path}", text)
    return f"./{wheel}\n"


def copy_course(folder: Path) -> Path:
    """Make a small course: the commands, one requirement and a first notebook."""
    (folder / "notebooks").mkdir(parents=True)
    for name in COPIED:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "notebooks" / "00-start-here.ipynb").write_text("{}")
    requirement = write_wheel(folder, "stand_ins", STAND_INS)
    (folder / "requirements.txt").write_text(requirement)
    return folder


@contextlib.contextmanager
def started(course: Path, *arguments: str, python=sys.executable, cwd=None, **changes):
    """Start `python3 -m helpers …`, and at the end kill it and what it started.

    Its pip sees no configuration and no index, but for the changes of its environment.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", **changes}
    process = subprocess.Popen(
        [python, "-m", "helpers", *arguments],
        cwd=cwd or course,
        env=env,
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
        process.communicate(timeout=INSTALL)


def _hear_ctrl_c() -> None:
    """Who runs the tests in the background has told all children to ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(course: Path, *arguments: str, **settings) -> tuple[int, str, str]:
    """Run `python3 -m helpers …`: its exit status, and what it writes to both."""
    with started(course, *arguments, **settings) as process:
        out, err = process.communicate(timeout=INSTALL)
    return process.returncode, out, err


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """Read a process's stdout up to the line with these words; return the line."""
    for line in process.stdout:
        if words in line:
            return line
    raise AssertionError(f"{words!r} never came: {process.stderr.read()}")


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Path:
    """A course that is set up, in a folder with a space and an umlaut."""
    course = copy_course(tmp_path_factory.mktemp("commands") / "Kurs für alle")
    status, out, err = run(course, "test")
    assert (status, err) == (5, "") and "Making .venv" in out and "Installing" in out
    return course


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Runs a command in a course without .venv, which fails; returns its sentence."""
    course = copy_course(tmp_path / "course")
    for name in ("REQUIREMENTS", "FIRST_NOTEBOOK", "LOCK"):
        place = getattr(commands, name).relative_to(ROOT)
        monkeypatch.setattr(commands, name, course / place)
    venv = commands.Venv(course / ".venv", commands.REQUIREMENTS)
    monkeypatch.setattr(commands, "LESSONS_VENV", venv)
    monkeypatch.setattr(commands, "ROOT", course)

    def run_here(*arguments: str) -> str:
        assert commands.main(list(arguments)) == 1
        assert not venv.built_from.exists()
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return run_here


# --- Good ground ----------------------------------------------------------------


def test_second_start_installs_nothing_and_passes_on_arguments_and_status(course):
    """Each step of a set-up takes the file away that says what has been built."""
    built = (course / ".venv" / ".built-from").stat()
    status, out, _ = run(course, "test", "-k", "two words")
    called = f"called __main__ {['--once-more', '-k', 'two words']} {course}"
    assert (status, out.splitlines()[0]) == (5, called)
    now = (course / ".venv" / ".built-from").stat()
    assert (now.st_ino, now.st_mtime_ns) == (built.st_ino, built.st_mtime_ns)


def test_works_from_another_folder_and_shares_the_tests_out(course, tmp_path):
    _, out, _ = run(course, "test", cwd=tmp_path, PYTHONPATH=str(course))
    workers = [] if (os.cpu_count() or 1) == 1 else ["-n", str(commands.WORKERS)]
    called, env = out.splitlines()
    arguments = ["--once-more", "--progress", *workers]
    assert called == f"called __main__ {arguments} {course}"
    assert env == f"env {course / '.venv'} None"  # PYTHONPATH would bring others in


def test_lab_opens_the_first_notebook_on_loopback_with_a_token(course):
    status, out, _ = run(course, "lab", "--no-browser")
    first = commands.FIRST_NOTEBOOK.relative_to(ROOT)
    assert status == 0 and f"--ServerApp.root_dir={course}" in out
    assert f"--LabApp.default_url=/lab/tree/{first.as_posix()}" in out
    assert "--ServerApp.ip=127.0.0.1" in out and "token" not in out
    assert out.index("'--no-browser'") > out.index("root_dir")
    assert (course / "signed").read_text() == str(course / first)


def test_lab_opens_unsigned_lessons_at_the_address_that_is_asked_for(course):
    (course / "signed").unlink(missing_ok=True)
    (course / "signed").mkdir()  # where the stand-in would write
    status, out, err = run(course, "lab", "--ip=127.0.0.2")
    (course / "signed").rmdir()
    assert (status, err) == (0, "")
    assert out.index("cannot be signed") < out.index("called")
    assert "'--ip=127.0.0.2'" in out and "127.0.0.1" not in out


def test_no_command_and_help_and_unknown_command(capsys):
    for arguments in ([], ["--help"], ["-h"]):
        assert commands.main(arguments) == 0
        printed = capsys.readouterr().out
        assert all(f"\n  {name} " in printed for name in commands.COMMANDS)
    assert commands.main(["labb"]) == 2
    printed = capsys.readouterr().err
    assert "'labb'" in printed and "usage:" in printed


def test_check_asks_for_a_lesson_and_says_what_its_exercises_say(course):
    status, _, err = run(course, "check")
    assert status == 2 and "required: NN" in err
    program = "import sys; print('called', *sys.argv[1:]); sys.exit(1)"
    (course / "helpers" / "solved.py").write_text(program)
    assert run(course, "check", "03") == (1, "called 03\n", "")


@pytest.mark.parametrize("lacking", [[], ["cloudpickle", "psutil"]])
def test_join_adds_what_is_lacking_and_replaces_nothing(monkeypatch, lacking):
    """On Colab and Kaggle: simgpu without its requirements, and never PyTorch."""
    calls = []
    monkeypatch.setattr(subprocess, "call", calls.append)
    for name in lacking:
        monkeypatch.setitem(sys.modules, name, None)
    assert commands.main(["join"]) == 0
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    assert calls.pop(0) == [*pip, "--no-deps", str(ROOT / "simgpu")]
    packages = [word for call in calls for word in call[len(pip) :]]
    assert [re.split("[<>=]", package)[0] for package in packages] == lacking


@pytest.mark.slow
def test_site_has_an_environment_of_its_own(tmp_path):
    course = copy_course(tmp_path / "course")
    (course / ".github" / "site").mkdir(parents=True)
    (course / ".github" / "site" / "requirements.txt").touch()
    (course / ".github" / "site" / "build.py").write_text(TELL)
    status, out, err = run(course, "site", "here", cwd=tmp_path, PYTHONPATH=str(course))
    assert (status, err) == (0, "") and "Making .venv.site" in out
    assert f"called __main__ {[str(tmp_path / 'here')]} {course}" in out
    assert f"env {course / '.venv.site'} None" in out
    assert not (course / ".venv").exists()


def test_join_needs_a_pytorch_and_a_pip_that_works(refused, monkeypatch):
    monkeypatch.setattr(subprocess, "call", lambda command: 1)
    assert "pip failed" in refused("join")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "PyTorch is missing" in refused("join")


def test_changed_requirements_are_installed(course):
    with open(course / "requirements.txt", "a") as file:
        file.write(write_wheel(course, "late_wish", {"late_wish.py": ""}))
    _, out, _ = run(course, "test")
    assert "late" in out and "Making .venv" not in out
    assert "Installing" not in run(course, "test")[1]


def test_the_package_that_the_course_once_was_is_taken_out(course):
    old = write_wheel(course, "multi_gpu_course", {"once.py": ""}).strip()
    python = course / ".venv" / commands.BIN / "python"
    pip = [python, "-m", "pip", "install", "-q", "--no-index", old]
    subprocess.run(pip, cwd=course, check=True, timeout=INSTALL)
    (course / "multi_gpu_course.egg-info").mkdir()  # what `pip install -e .` left
    with open(course / "requirements.txt", "a") as file:
        file.write("# another reason to install\n")
    status, _, err = run(course, "test")
    assert (status, err) == (5, "")
    assert not (course / "multi_gpu_course.egg-info").exists()
    imported = subprocess.run([python, "-c", "import once"], stderr=subprocess.PIPE)
    assert b"No module named 'once'" in imported.stderr


def test_another_python_or_folder_builds_anew(monkeypatch):
    want = commands.wanted(commands.LESSONS_VENV)
    with monkeypatch.context() as patch:
        patch.setattr(sys.implementation, "cache_tag", "cpython-399")
        assert commands.wanted(commands.LESSONS_VENV)[0] != want[0]
    monkeypatch.setattr(commands, "ROOT", ROOT / "notebooks" / "..")
    assert commands.wanted(commands.LESSONS_VENV)[0] != want[0]


def test_a_file_of_the_readers_named_helpers_does_no_harm(tmp_path):
    (tmp_path / "helpers.py").write_text("raise RuntimeError('not yours')")
    (tmp_path / "script.py").write_text(
        "import torch; print(torch.cuda.device_count())"
    )
    command = [sys.executable, "-m", "simgpu", "--gpus", "2", "script.py"]
    environ = os.environ | {"HELPERS_GPUS": "simulated"}
    environ.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, timeout=INSTALL
    )
    assert (done.stdout.split(), done.stderr) == ([b"2"], b"")


# --- Interrupted and simultaneous starts ----------------------------------------


@posix
@pytest.mark.parametrize(
    "line, number, status",
    [("Making .venv", signal.SIGINT, 130), ("Processing", signal.SIGKILL, -9)],
)
@pytest.mark.slow
def test_set_up_that_was_ended_is_quiet_and_repaired(tmp_path, line, number, status):
    course = copy_course(tmp_path / "course")
    with started(course, "test") as process:
        read_until(process, line)
        os.killpg(process.pid, number)  # as a terminal does it
        assert process.wait(INSTALL) == status
        assert process.stderr.read() == ""
    assert not (course / ".venv" / ".built-from").exists()
    status, out, _ = run(course, "test")
    assert status == 5 and "Making .venv" in out


@pytest.mark.parametrize("lost", ["pyvenv.cfg", commands.BIN])
@pytest.mark.slow
def test_broken_venv_is_rebuilt(course, lost):
    path = course / ".venv" / lost
    path.unlink() if path.is_file() else shutil.rmtree(path)
    (course / ".venv" / "left-over").touch()
    status, out, _ = run(course, "test")
    assert status == 5 and "Making .venv" in out
    assert not (course / ".venv" / "left-over").exists()


@posix
@pytest.mark.slow
def test_starts_take_turns_even_if_the_first_is_killed(tmp_path):
    course = copy_course(tmp_path / "course")
    with started(course, "test") as first:
        read_until(first, "Making .venv")
        (step,) = wait(lambda: psutil.Process(first.pid).children(), "its step")
        step.suspend()
        first.kill()  # the step goes on, as an orphan
        with started(course, "test") as second, started(course, "test") as third:
            read_until(second, "Waiting for it")
            read_until(third, "Waiting for it")
            step.resume()
            said = second.stdout.read() + third.stdout.read()
            assert said.count("Making .venv") == said.count("Installing the pack") == 1
            assert second.wait(INSTALL) == third.wait(INSTALL) == 5


@posix
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 0), (signal.SIGTERM, -15)])
def test_the_lab_has_the_process_and_its_signals_for_itself(course, number, status):
    """So nothing is left after Ctrl-C, and it is JupyterLab that ends quietly."""
    with started(course, "lab", "--stay") as process:
        assert read_until(process, "staying").split()[1] == str(process.pid)
        os.kill(process.pid, number)
        assert process.wait(INSTALL) == status
        assert process.stderr.read() == ""


# --- Bad ground -----------------------------------------------------------------


def test_old_python_is_turned_away(tmp_path):
    found = [*Path("/usr/bin").glob("python3.[6-9]")]
    found += Path.home().glob(".pyenv/versions/3.[6-9].*/bin/python3")
    if not found:
        pytest.skip("no Python older than 3.10 here")
    course = copy_course(tmp_path / "course")
    status, _, err = run(course, "lab", python=found[0])
    said = re.fullmatch(r"Python 3.10 or newer is needed, this is 3\.[6-9].*\n", err)
    assert status == 1 and said and not (course / ".venv").exists()


@pytest.mark.parametrize(
    "wish, words, settings",
    [
        ("torch", "package index could not be reached", NOWHERE),
        ("no-such-package", "No matching distribution found for no-such-package", {}),
    ],
)
@pytest.mark.slow
def test_packages_that_pip_cannot_get(course, wish, words, settings):
    requirements = course / "requirements.txt"
    good = requirements.read_text()
    requirements.write_text(wish)
    status, _, err = run(course, "test", **settings)
    requirements.write_text(good)
    assert not (course / ".venv" / ".built-from").exists()
    assert status == 1 and words in err and err.count("\n") == 1
    assert run(course, "test")[0] == 5


@pytest.mark.parametrize(
    "complaint, free", [(f"OSError: [Errno {errno.ENOSPC}] No", 10**9), ("", 9)]
)
def test_a_full_disk_is_named_as_the_cause(monkeypatch, complaint, free):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    said = commands.step_failed("Making .venv", 1, complaint)
    assert str(said) == commands.DISK_IS_FULL


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "No space"), (errno.EROFS, "not allowed"), (errno.EIO, "/place")],
)
def test_operating_system_refuses(refused, monkeypatch, number, words):
    def refuses(*_, **__):
        raise OSError(number, os.strerror(number), "/place")

    monkeypatch.setattr(commands, "open", refuses, raising=False)
    assert words in refused("test")


@pytest.mark.skipif(
    os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere"
)
def test_read_only_folder(refused):
    commands.ROOT.chmod(0o555)
    assert "not allowed" in refused("lab")
    commands.ROOT.chmod(0o755)


@pytest.mark.parametrize("form", ["--port {}", "--port={}", "--ServerApp.port={}"])
def test_port_that_is_taken(refused, form):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = refused("lab", *form.format(port).split())
    assert said.startswith(f"Port {port} cannot be used")


def test_first_notebook_missing(refused):
    commands.FIRST_NOTEBOOK.unlink()
    assert "00-start-here.ipynb is missing" in refused("lab")


def test_continuous_integration_runs_the_readmes_command_and_tests_that_are_there():
    script = (ROOT / ".ci" / "run").read_text()
    assert "\npython3 -m helpers test 2>&1 |" in script
    slow = re.findall(r'^    "(\S+\.py)::(\w+)', script, re.MULTILINE)
    assert len(slow) == script.count("::") > 12
    for file, name in slow:
        assert f"\ndef {name}(" in (ROOT / file).read_text()
