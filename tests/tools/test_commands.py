"""Each command that tests/README.md lists is there and says how it is used."""

import re
import runpy
import sys

import pytest

from support import checkout
from tests.harness.small_course import ROOT
from tests.tools import elsewhere, faults, planted, regenerate

README = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("tool", [elsewhere, faults, planted, regenerate])
def test_a_tool_says_how_it_is_used(tool, capsys):
    with pytest.raises(SystemExit, match="0"):
        tool.main(["--help"])
    assert f"usage: python -m {tool.__name__} " in capsys.readouterr().out


def test_a_tool_is_a_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["regenerate", "no-number"])
    monkeypatch.delitem(sys.modules, regenerate.__name__)  # or runpy warns
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module(regenerate.__name__, run_name="__main__")
    assert "no lesson has the number" in capsys.readouterr().err


def test_the_readme_lists_every_command():
    tools = {f.stem for f in checkout.here(ROOT / "tests/tools", "[!_]*.py")}
    scripts = {f.stem for f in checkout.here(ROOT / "tests/benchmarks", "[!_]*.py")}
    scripts |= {"fidelity", "allocator"}
    scripts |= {f.stem for f in checkout.here(ROOT / "simgpu/tests/tools", "*.py")}
    assert set(re.findall(r"python -m tests\.tools\.(\w+)", README)) == {
        name for name in tools if not name.startswith("test_")
    }
    assert (
        set(re.findall(r"python (?:simgpu/)?tests/(?:\w+/)?(\w+)\.py", README))
        == scripts
    )
