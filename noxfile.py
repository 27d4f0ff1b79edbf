"""The same tests with other PyTorchs, the types, and the package that users install.

    nox -s tests-2.13                  # what `python3 -m helpers test` runs
    nox -s tests-2.11 -- simgpu/tests/test_nccl.py
    nox -s types build

The workflows run these sessions. Without arguments, a session leaves out what is slow.
The stored outputs of lessons are those of the newest PyTorch. The others (2.11 is
Colab's) compare them, too, but for the cells that tests/harness/versions.py lists.
"""

import tempfile
from pathlib import Path

import nox

NEWEST = "2.15"  # it made the lessons' outputs
TORCHS = ("2.11", "2.13", "2.14", NEWEST)
nox.options.sessions = [f"tests-{NEWEST}", "types", "build"]
nox.options.reuse_existing_virtualenvs = True


def _test(session: nox.Session, what: list[str]) -> None:
    """Run pytest: what is asked for, or `what`."""
    session.run("python", "-c", "import torch; print('PyTorch', torch.__version__)")
    session.run("python", "-m", "pytest", *(session.posargs or what))


def _tests_with(version: str) -> None:
    """Define the session `tests-VERSION`."""

    @nox.session(name=f"tests-{version}")
    def tests(session: nox.Session) -> None:
        lines = Path("requirements.txt").read_text(encoding="utf-8").splitlines()
        others = Path(session.create_tmp(), "requirements.txt")
        kept = [line for line in lines if not line.startswith(("torch", "-e"))]
        others.write_text("\n".join(kept), encoding="utf-8")
        session.install("-r", str(others), f"torch=={version}.*", "-e", "./simgpu")
        _test(session, ["--once-more", "-n", "3"])


for torch in TORCHS:
    _tests_with(torch)


@nox.session(name="tests-next")
def tests_next(session: nox.Session) -> None:
    """With a PyTorch that is not out yet; simgpu alone, of which it warns in a line."""
    major, minor = NEWEST.split(".")
    session.install("-e", "./simgpu[test]")
    newer = f"torch>={major}.{int(minor) + 1}.0.dev0"
    session.install("--pre", "--upgrade", newer)
    _test(session, ["-m", "not slow and not packages", "simgpu/tests"])


@nox.session
@nox.parametrize(
    "settings",
    [
        # what the libraries of PyTorch choose on an old processor, a newer one
        {
            "ATEN_CPU_CAPABILITY": "default",
            "ONEDNN_MAX_CPU_ISA": "SSE41",
            "MKL_CBWR": "COMPATIBLE",
        },
        {
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "MKL_CBWR": "AVX2",
        },
        {"ATEN_CPU_CAPABILITY": "avx512"},
        {"OMP_NUM_THREADS": "2"},
    ],
    ids=["old", "avx2", "avx512", "threads"],
)
def processors(session: nox.Session, settings: dict[str, str]) -> None:
    """The lessons as other processors compute them, with all outputs compared."""
    session.install("-r", "requirements.txt")
    session.env.update(settings)
    _test(session, ["-n", "3", "notebooks"])


@nox.session
def types(session: nox.Session) -> None:
    """mypy, as simgpu/pyproject.toml says; and that all that is public has types."""
    session.install("mypy>=1.18,<3", "-e", "./simgpu[test]")
    session.chdir("simgpu")
    session.run("python", "-m", "mypy")
    session.run("python", "-m", "pytest", "-q", "tests/test_package.py")


@nox.session
def build(session: nox.Session) -> None:
    """Build simgpu, and test the wheel where nothing of this repository is."""
    session.install("build", "twine")
    with tempfile.TemporaryDirectory() as folder:
        session.run("python", "-m", "build", "-o", folder, "simgpu")
        wheel, sdist = (next(Path(folder).glob(g)) for g in ("*.whl", "*.tar.gz"))
        twine = ("python", "-m", "twine", "check", "--strict")
        session.run(*twine, str(wheel), str(sdist))
        session.install("--force-reinstall", "--no-deps", str(wheel))
        session.install(f"simgpu[test] @ {wheel.as_uri()}")
        session.run("python", "-m", "tarfile", "-e", str(sdist), folder)
        session.chdir(str(next(Path(folder).glob("simgpu-*/"))))
        _test(session, ["-m", "not slow and not packages"])
