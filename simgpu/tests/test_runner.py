"""Unmodified CUDA scripts through `python -m simgpu`."""

import subprocess
import sys
import textwrap

import pytest
import torch

import simgpu
from simgpu import __main__ as runner
from simgpu import _options as options_module
from support import programs


def run(
    tmp_path, script: str, *arguments, gpus=4, flags=(), **options
) -> programs.Done:
    """What a script leaves that knows nothing of the simulator."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script), encoding="utf-8")
    arguments = ("--gpus", gpus, *flags, path, *arguments)
    return programs.simulated(tmp_path, *arguments, **options)


def words(done: programs.Done) -> list[str]:
    assert done.status == 0, done.stderr
    return done.stdout.split()


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
            sys.exit(3)
    """
    done = run(tmp_path, script, "--gpus", "9", "--", "-x", new_python=True)
    assert done.stdout == "[0, 1, 2, 3] 12.0 7 ['--gpus', '9', '--', '-x']\n"
    assert done.status == 3, done.stderr


def test_visible_devices_count_only_before_the_first_use(tmp_path):
    script = """
        import os
        import torch

        print(torch.cuda.device_count())
        os.environ["CUDA_VISIBLE_DEVICES"] = "5,3,1"  # before CUDA is used
        print(torch.zeros(1, device="cuda").device, torch.cuda.device_count())
        os.environ["CUDA_VISIBLE_DEVICES"] = "2"  # too late
        for i in range(torch.cuda.device_count()):
            print(torch.cuda.get_device_properties(i).pci_bus_id)
    """
    found = words(run(tmp_path, script, gpus=6, CUDA_VISIBLE_DEVICES="5,4"))
    assert found == ["2", "cuda:0", "3", "5", "3", "1"]


def test_cudas_own_look_keeps_what_it_has_seen(tmp_path):
    """NVML reads the variable until CUDA is initialised, and C++ does not again."""
    script = """
        import os
        import torch

        print(torch._C._cuda_getDeviceCount())
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        print(torch.cuda.device_count(), torch._C._cuda_getDeviceCount())
        print(torch.ones(1, device="cuda:3").device, torch.cuda.device_count())
    """
    assert words(run(tmp_path, script)) == ["4", "1", "4", "cuda:3", "4"]


def test_no_visible_device_means_no_cuda(tmp_path):
    script = """
        import torch

        print(torch.cuda.is_available(), torch.cuda.device_count())
        with torch.accelerator.device_index(None):
            print(torch.ones(1).device)
    """
    found = words(run(tmp_path, script, CUDA_VISIBLE_DEVICES=""))
    assert found == ["False", "0", "cpu"]


def test_the_traceback_is_the_scripts_own(tmp_path):
    done = run(tmp_path, "import torch; torch.ones(2, device='cuda:4')")
    assert done.status == 1
    assert "AcceleratorError: CUDA error: invalid device ordinal" in done.stderr


def test_errors_of_the_script_show_no_line_of_ours(tmp_path):
    done = run(tmp_path, "def broken(:")
    path = tmp_path / "script.py"
    assert done.stderr.startswith(f'  File "{path}", line 1\n') and done.status == 1
    done = run(tmp_path, "import simgpu; simgpu.host_busy(-1)")
    assert "simgpu/_startup.py" in done.stderr  # a defect of ours would show
    script = "import torch\n@torch.compile\ndef f():\n    1 / 0\nf()"
    for flags, how in (([], "timed as fused"), (["--no-compile"], "uncompiled")):
        done = run(tmp_path, script, flags=flags)
        assert done.stderr.count("File") == 2 and how in done.stderr


def test_a_module_runs_as_main(tmp_path):
    (tmp_path / "tool.py").write_text(
        "import sys, torch; print(__name__, torch.cuda.device_count(), sys.argv[1:])",
        encoding="utf-8",
    )
    done = programs.simulated(tmp_path, "--gpus", 2, "-m", "tool", "a")
    assert done.stdout == "__main__ 2 ['a']\n", done.stderr


def test_real_gpus_are_not_simulated(tmp_path):
    done = run(tmp_path, "print('ran')", gpus=63, SIMGPU="off")
    assert (done.status, done.stdout) == (1, "")
    assert "of 63 GPUs" in done.stderr


@pytest.mark.parametrize(
    "options, gpus, reason",
    [
        *((["script.py"], gpus, "choose 1 to 64") for gpus in ("0", "-2", "1000000")),
        (["script.py"], "two", "invalid int value"),
        (["--card", "RTX", "script.py"], "1", "unknown card 'RTX'"),
        (["--memory", "much", "script.py"], "1", "cannot read 'much'"),
        (["missing.py"], "1", "there is no script missing.py"),
        (["dryrun"], "1", "there is no script dryrun; the command is: simgpu dry-run"),
        (["deepspeed"], "1", "deepspeed is not installed beside this Python: pip ins"),
        ([], "1", "required: program"),
        (["python3", "script.py"], "1", "python3 is a command: say --children"),
        (["--races", "hide", "script.py"], "1", "invalid choice: 'hide'"),
    ],
)
def test_bad_requests_say_why(options, gpus, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("print('ran')", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["simgpu", "--gpus", gpus, *options])
    monkeypatch.setattr(simgpu, "start", lambda **_: pytest.fail("it starts"))
    monkeypatch.setattr(subprocess.Popen, "__init__", subprocess.Popen.__init__)
    with pytest.raises(SystemExit) as ended:
        runner.main()
    assert ended.value.code not in (None, 0)
    # Python prints what is raised, if that is text
    assert reason in f"{ended.value} {capsys.readouterr().err}"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["script.py"], "--gpus N is missing: how many GPUs"),
        (["script.py", "--gpus", "2"], "write it before: simgpu --gpus N script.py"),
        (["sweeps", "script.py"], "the command is: simgpu sweep"),
    ],
)
def test_no_number_of_gpus(words, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("print('ran')", encoding="utf-8")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit):
        options_module.options(words)
    assert reason in capsys.readouterr().err


def test_a_script_whose_launcher_was_forgotten_is_told_of_it(tmp_path):
    script = "import torch.distributed as dist; dist.init_process_group('nccl')"
    done = run(tmp_path, script, gpus=2)
    assert done.status == 1
    *_, error, hint = done.stderr.splitlines()
    assert error.endswith("variable RANK expected, but not set")
    command = f"simgpu --gpus 2 torchrun --nproc-per-node=2 {tmp_path / 'script.py'}"
    assert hint.endswith(command)


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_the_command_says_what_else_there_is_and_its_version(word, capsys):
    with pytest.raises(SystemExit) as ended:
        options_module.options([word])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    if word == "--version":
        assert printed == f"simgpu {simgpu.__version__}\n"
    else:
        assert all(f"simgpu {name} " in printed for name in options_module.SUBCOMMANDS)


@pytest.mark.parametrize(
    ("name", "first", "words"),
    [
        ("train.py", "#!/bin/bash", None), ("train", "#!/usr/bin/env python3", None),
        ("train", "import torch", None), ("train.sh", "python train.py", ["sh"]),
        ("train", "#!/usr/bin/env bash", ["/usr/bin/env", "bash"]),
        ("train", "#!/bin/bash -e", ["/bin/bash", "-e"]), ("train", "\x7fELF", []),
    ],
)  # fmt: skip
def test_a_program_that_is_not_python_is_told_by_its_first_line(
    tmp_path, name, first, words
):
    path = tmp_path / name
    path.write_text(f"{first}\n")
    expected = None if words is None else [*words, str(path)]
    assert options_module.other_program(str(path)) == expected


def test_a_shell_script_and_what_it_starts_have_the_gpus(tmp_path):
    path = tmp_path / "train.sh"
    path.write_text(
        f"#!/bin/sh\n{sys.executable} -c 'import torch\n"
        "print(torch.cuda.device_count())'\necho $1\nexit 3\n"
    )
    done = programs.simulated(tmp_path, "--gpus", 5, path, "rest", new_python=True)
    assert (done.status, done.stdout) == (3, "5\nrest\n"), done.stderr


def test_nvidia_smi_lists_the_simulated_gpus(tmp_path):
    script = """
        import subprocess, torch
        x = torch.zeros(5 * 2**20, dtype=torch.uint8, device="cuda:1")
        print(*(torch.cuda.get_device_properties(i).uuid for i in range(2)))
        query = "--query-gpu=index,name,memory.total,memory.used"
        for options in (["-L"], [query, "--format=csv"], ["dmon"],
                        ["-i", "1", "--query-gpu=memory.total",
                         "--format=csv,noheader,nounits"]):
            subprocess.run(["nvidia-smi", *options], stderr=subprocess.STDOUT)
    """
    flags = ("--memory", "64MB")
    shown = run(tmp_path, script, gpus=2, flags=flags, new_python=True).stdout
    uuids, *lines = shown.splitlines()
    name = "NVIDIA A100-SXM4-80GB (simulated)"
    assert lines[:2] == [
        f"GPU {i}: {name} (UUID: GPU-{uuid})" for i, uuid in enumerate(uuids.split())
    ]
    assert lines[2:5] == [
        "index, name, memory.total [MiB], memory.used [MiB]",
        f"0, {name}, 64 MiB, 0 MiB", f"1, {name}, 64 MiB, 20 MiB"]  # fmt: skip
    assert lines[5].endswith("and no dmon") and lines[6:] == ["64"]


def test_marks_for_a_profiler_do_no_harm():
    simgpu.start(1)
    with torch.cuda.nvtx.range("step"):
        assert torch.cuda.nvtx.range_push("inside") == 1
        assert torch.cuda.nvtx.range_pop() == 1
        torch.cuda.nvtx.mark("here")
    torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("free"))
    simgpu.stop()


def test_a_module_of_our_name_beside_the_script_is_told_of(tmp_path):
    (tmp_path / "simgpu.py").write_text("OWN = True\n", encoding="utf-8")
    script = "import simgpu\nprint(simgpu.is_running(), hasattr(simgpu, 'OWN'))"
    done = run(tmp_path, script)
    assert done.stdout == "True False\n"
    assert f"{tmp_path / 'simgpu.py'} cannot be imported under this" in done.stderr
