"""Each command that tests/README.md lists is there and says how it is used."""

import re
import subprocess
import sys

import pytest

from tests.harness.small_course import ROOT
from tests.tools import elsewhere, faults, regenerate

README = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("tool", [elsewhere, faults, regenerate])
def test_a_tool_says_how_it_is_used(tool, capsys):
    with pytest.raises(SystemExit, match="0"):
        tool.main(["--help"])
    assert f"usage: python -m {tool.__name__} " in capsys.readouterr().out


def test_a_tool_is_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.regenerate", "no-number"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, "no lesson has the number" in done.stderr) == (2, True)


def test_the_readme_lists_every_command():
    tools = {f.stem for f in (ROOT / "tests/tools").glob("[!_]*.py")}
    scripts = {f.stem for f in (ROOT / "tests/benchmarks").glob("*.py")}
    scripts |= {"fidelity"}
    scripts |= {f.stem for f in (ROOT / "simgpu/tests/tools").glob("*.py")}
    assert set(re.findall(r"python -m tests\.tools\.(\w+)", README)) == {
        name for name in tools if not name.startswith("test_")
    }
    assert (
        set(re.findall(r"python (?:simgpu/)?tests/(?:\w+/)?(\w+)\.py", README))
        == scripts
    )
