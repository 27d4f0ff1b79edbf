"""`simgpu` is a package of its own; `simgpu` is another name for it."""

import importlib
import subprocess
import sys

import simgpu
import simgpu as through_helpers
import simgpu._startup


def test_helpers_simgpu_is_the_same_module_and_not_a_copy():
    assert through_helpers is simgpu
    module = importlib.import_module("simgpu._startup")
    assert module is simgpu._startup
    assert module.__spec__.name == "simgpu._startup"


def test_the_old_command_still_runs_a_script(tmp_path):
    script = tmp_path / "two.py"
    script.write_text("import torch; print(torch.cuda.device_count())")
    command = [sys.executable, "-m", "simgpu", "--gpus", "2", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr, done.returncode) == ("2\n", "", 0)


def test_importing_simgpu_does_not_import_pytorch():
    """pytest looks at the plugin in every run, whatever is tested."""
    script = "import sys, simgpu.pytest_plugin; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_every_public_name_is_there():
    for name in simgpu.__all__:
        assert getattr(simgpu, name) is not None
