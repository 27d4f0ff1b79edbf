"""Unmodified CUDA scripts through `python -m helpers.simgpu`."""

import os
import subprocess
import sys
import textwrap

import pytest

from helpers import simgpu
from helpers.simgpu import __main__ as runner

WHO = """
    import torch
    print(torch.cuda.device_count())
    for i in range(torch.cuda.device_count()):
        print(torch.cuda.get_device_properties(i).pci_bus_id)
"""


def run(tmp_path, script, *options, gpus=4, module=None, **environment):
    """The finished process of a script that knows nothing of the simulator."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script), encoding="utf-8")
    environment = {"HELPERS_GPUS": "simulated", **environment}
    program = ["-m", module] if module else [str(path)]
    return subprocess.run(
        [sys.executable, "-m", "helpers.simgpu", "--gpus", str(gpus)]
        + [*program, *options],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
        | environment,
    )


def words(process) -> list[str]:
    assert process.returncode == 0, process.stderr
    return process.stdout.split()


def test_a_script_finds_its_gpus_arguments_and_neighbours(tmp_path):
    (tmp_path / "neighbour.py").write_text("VALUE = 7\n", encoding="utf-8")
    script = """
        import sys
        import neighbour
        import torch

        if __name__ == "__main__":
            x = [torch.full((2,), float(i), device=f"cuda:{i}") for i in range(4)]
            total = sum(t.sum().item() for t in x)
            print([t.get_device() for t in x], total, neighbour.VALUE, sys.argv[1:])
    """
    process = run(tmp_path, script, "--gpus", "9", "--", "-x")
    assert process.returncode == 0, process.stderr
    assert process.stdout == "[0, 1, 2, 3] 12.0 7 ['--gpus', '9', '--', '-x']\n"


def test_visible_devices_hide_gpus(tmp_path):
    found = words(run(tmp_path, WHO, gpus=6, CUDA_VISIBLE_DEVICES="5,4"))
    assert found == ["2", "5", "4"]


def test_no_visible_device_means_no_cuda(tmp_path):
    script = "import torch; print(torch.cuda.is_available(), torch.cuda.device_count())"
    assert words(run(tmp_path, script, CUDA_VISIBLE_DEVICES="")) == ["False", "0"]


def test_visible_devices_count_only_before_the_first_use(tmp_path):
    script = """
        import os
        import torch

        os.environ["CUDA_VISIBLE_DEVICES"] = "1,3"  # before CUDA is used
        print(torch.zeros(1, device="cuda").device, torch.cuda.device_count())
        os.environ["CUDA_VISIBLE_DEVICES"] = "2"  # too late
        print(torch.cuda.device_count())
        print(torch.cuda.get_device_properties(1).pci_bus_id)
    """
    assert words(run(tmp_path, script)) == ["cuda:0", "2", "2", "3"]


def test_exit_status_and_traceback_are_the_scripts_own(tmp_path):
    assert run(tmp_path, "import sys; sys.exit(3)").returncode == 3
    process = run(tmp_path, "import torch; torch.ones(2, device='cuda:4')")
    assert process.returncode == 1
    assert "AcceleratorError: CUDA error: invalid device ordinal" in process.stderr


def test_a_module_runs_as_main(tmp_path):
    (tmp_path / "tool.py").write_text(
        "import sys, torch; print(__name__, torch.cuda.device_count(), sys.argv[1:])",
        encoding="utf-8",
    )
    process = run(tmp_path, "", "a", module="tool", gpus=2)
    assert process.stdout == "__main__ 2 ['a']\n", process.stderr


@pytest.mark.parametrize(
    "options, gpus, reason",
    [
        (["script.py"], "0", "choose 1 to 64"),
        (["script.py"], "-2", "choose 1 to 64"),
        (["script.py"], "1000000", "choose 1 to 64"),
        (["script.py"], "two", "invalid int value"),
        (["--card", "RTX", "script.py"], "1", "unknown card 'RTX'"),
        (["--memory", "much", "script.py"], "1", "cannot read 'much'"),
        (["missing.py"], "1", "there is no script missing.py"),
        ([], "1", "required: program"),
    ],
)
def test_bad_requests_say_why(options, gpus, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("print('ran')", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["helpers.simgpu", "--gpus", gpus, *options])
    monkeypatch.setattr(simgpu, "start", lambda **_: pytest.fail("it starts"))
    with pytest.raises(SystemExit) as ended:
        runner.main()
    assert ended.value.code not in (None, 0)
    # Python prints what is raised, if that is text
    assert reason in f"{ended.value} {capsys.readouterr().err}"


def test_real_gpus_are_not_simulated(tmp_path):
    process = run(tmp_path, WHO, gpus=63, HELPERS_GPUS="real")
    assert process.returncode == 1
    assert "of 63 GPUs" in process.stderr


def test_marks_for_a_profiler_do_no_harm(tmp_path):
    script = """
        import torch
        with torch.cuda.nvtx.range("step"):
            print(torch.cuda.nvtx.range_push("inside"), torch.cuda.nvtx.range_pop())
            torch.cuda.nvtx.mark("here")
        torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("free"))
    """
    assert words(run(tmp_path, script)) == ["1", "1"]
