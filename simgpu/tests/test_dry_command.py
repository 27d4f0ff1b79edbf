"""`simgpu dry-run`: what it says, its exit status, its files, its refusals."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time

import pytest
import torch

from support import programs
from support.limits import SHORT

TRAIN = """
import argparse, os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--steps", type=int, default=9)
options = parser.parse_args()
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
layers = nn.Embedding(1000, 512), nn.Linear(512, 2048), nn.Linear(2048, 512)
model = nn.Sequential(*layers)
for part in [*model, model.cuda()]:
    fully_shard(part)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(options.steps):
    tokens = torch.randint(1000, (options.batch, 1024), device="cuda")
    loss = model(tokens).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if loss.item() > 0.5:
        print("step", step, "of rank", dist.get_rank())
"""


def line(text: str) -> str:
    """The first line of the program that begins so: "train.py:12"."""
    lines = TRAIN.splitlines()
    found = next(i for i, its in enumerate(lines) if its.strip().startswith(text))
    return f"train.py:{found + 1}"


@pytest.fixture
def dry_run(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)

    def run(*words):
        return programs.simulated(tmp_path, "dry-run", *words)

    return run


def test_the_report_and_its_json(dry_run, tmp_path):
    words = ["--world", 64, "--rank", 9, "--json", "found.json", "train.py"]
    done = dry_run(*words, "--batch", 8)
    assert done.status == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["step 0 of rank 9", "step 1 of rank 9"]  # of three, it stops
    assert lines[2] == (
        "rank 9 of 64 on NVIDIA H100 80GB HBM3, simulated, without values"
    )
    assert f"  {line('if loss')}: 1.0, 2 times" in lines
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["fits"] and found["steps"] == 3
    assert found["total_bytes"] == int(79.19 * 2**30)
    assert found["tokens"] == 8 * 1024 * 64
    assert found["tokens_per_second"] == found["tokens"] / found["step_seconds"]
    parts = ("compute_seconds", "exposed_seconds", "host_seconds")
    assert sum(found[part] for part in parts) == pytest.approx(found["step_seconds"])
    read = {"line": line("if loss"), "value": 1.0, "times": 2}
    assert found["unknown_reads"] == [read]
    parameters = (1000 * 512 + 512 * 2048 + 2048 + 2048 * 512 + 512) * 4
    assert found["memory_by_kind"]["parameters"] >= parameters // 64
    assert sum(found["memory_by_kind"].values()) == found["peak_bytes"]
    assert found["peak_bytes"] <= found["reserved_bytes"] < found["total_bytes"]
    # three products of two linear layers for each token, over the time
    flops = 3 * 2 * 8 * 1024 * (512 * 2048 * 2)
    assert found["mfu"] == pytest.approx(flops / found["step_seconds"] / 989.4e12)


def test_a_card_that_is_too_small(dry_run):
    done = dry_run("--world", 8, "--memory", "128MB", "train.py", "--batch", 64)
    assert done.status == 3
    lines = done.stdout.splitlines()
    assert lines[1] == f"does not fit: {line('loss =')} asks for too much"
    assert lines[2] == "  CUDA out of memory. Tried to allocate 128.00 MiB."


def test_what_stands_behind_torchrun(dry_run):
    words = ["torchrun", "--nnodes", 4, "--nproc-per-node=8", "train.py", "--batch=1"]
    done = dry_run("--card", "A100", *words)
    assert done.status == 0, done.stderr
    assert "rank 0 of 32 on NVIDIA A100-SXM4-80GB" in done.stdout


def test_the_flight_recorder_of_a_rank_that_is_alone(dry_run, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "trace_"))
    waits = "import time; time.sleep(0.5)  # its thread looks whether others failed\n"
    slow = TRAIN.replace("for step", waits + "for step", 1)
    (tmp_path / "train.py").write_text(slow)
    done = dry_run("--world", 4, "train.py")
    assert done.status == 0 and "Traceback" not in done.stderr, done.stderr


def test_the_files_for_other_tools(dry_run, tmp_path):
    files = ["--timeline", "trace.json", "--memory-snapshot", "memory.pickle"]
    done = dry_run("--world", 16, *files, "train.py")
    assert done.status == 0, done.stderr
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {row["name"] for row in rows}
    assert {"mm", "all_gather 0", "reduce_scatter 0"} <= names
    snapshot = pickle.loads((tmp_path / "memory.pickle").read_bytes())
    actions = {event["action"] for event in snapshot["device_traces"][0]}
    assert {"alloc", "free_completed", "segment_alloc"} <= actions
    lines = {f["line"] for e in snapshot["device_traces"][0] for f in e["frames"]}
    assert int(line("loss =")[9:]) in lines and snapshot["segments"]


@pytest.mark.parametrize(("words", "said"), [
    (["--world", 12, "--node", 8], "cannot be spread over nodes of 8; choose"),
    (["--world", 8, "--rank", 8], "no rank 8 among 8; choose 0 to 7"),
    (["--world", 8, "--steps", 1], "cannot tell a steady one from the first"),
    (["--world", 8, "--kinds", "pp=3"], "8 ranks cannot be shared equally by 3"),
    (["--world", 8, "--kinds", "0,9"], "there is no rank 9 among 8"),
    (["--world", 8, "--kinds", "x"], 'write "pp=4" for stages'),
    (["--world", 8, "--card", "H1"], "unknown card 'H1'"),
    (["--world", 8, "--memory", "1TB"], "does not have 1TB of memory"),
    ([], "--world N is missing"),
    (["train.py", "--world", 8], "write it before: simgpu dry-run --world N train.py"),
])  # fmt: skip
def test_a_command_line_that_cannot_be(dry_run, words, said):
    done = dry_run(*words, "train.py")
    assert done.status == 2 and said in done.stderr, done.stderr


def test_a_script_that_does_not_step(dry_run):
    done = dry_run("--world", 4, "train.py", "--steps", 1)
    assert done.status == 1
    assert "the program ended after 1 of 3 steps" in done.stderr
    assert ", before any step of an optimizer" not in done.stdout
    done = dry_run("--world", 4, "train.py", "--steps", 0)
    assert "are left, before any step of an optimizer" in done.stdout
    assert "memory at the peak" in done.stdout


@pytest.mark.parametrize(("code", "status"), [(0, 0), (4, 1)])
def test_a_script_that_ends_by_itself(dry_run, tmp_path, code, status):
    text = TRAIN + f"raise SystemExit({code})\n"
    (tmp_path / "train.py").write_text(text)
    done = dry_run("--world", 4, "train.py", "--steps", 2)
    assert done.status == status, done.stderr
    assert ("what binds" in done.stdout) == (status == 0)
    assert (f"ended with exit status {code}" in done.stderr) == (status == 1)


SAVES = """
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

dist.init_process_group("nccl")
net = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(2):
    net(torch.randn(16, 64, device="cuda")).mean().backward()
    optimizer.step()
dcp.save({"net": net.state_dict()}, checkpoint_id="run")
torch.save(net.state_dict(), "best.pt")
torch.save(net.state_dict(), "new.pt")
torch.save(net.state_dict(), "new.pt")
"""


def test_files_that_were_there_stay(dry_run, tmp_path):
    (tmp_path / "train.py").write_text(SAVES)
    (tmp_path / "run").mkdir()
    names = "best.pt", "run/__0_0.distcp", "run/.metadata"
    there = [tmp_path / name for name in names]
    for path in there:
        path.write_text("dear")
    done = dry_run("--world", 8, "train.py")
    assert done.status == 0, done.stderr
    assert [path.read_text() for path in there] == ["dear"] * 3
    assert sorted((tmp_path / "run").iterdir()) == sorted(there[1:])
    for path in there:
        assert f"{path.name} is there, and stays as it is" in done.stdout
    assert torch.load(tmp_path / "new.pt", "cpu")["weight"].shape == (64, 64)
    assert "train.py:15: a file of shapes, without these values" in done.stdout


HUGE = """
import os
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
with torch.device("meta"):
    net = nn.Sequential(*(nn.Linear(32768, 32768, bias=False) for _ in range({})))
net = nn.parallel.DistributedDataParallel(net.to_empty(device="cuda"))
optimizer = torch.optim.SGD(net.parameters())
for _ in range(3):
    net(torch.randn(16, 32768, device="cuda")).mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("layers, status", [(9, 0), (12, 3)])
def test_buckets_that_are_larger_than_this_machine(dry_run, tmp_path, layers, status):
    (tmp_path / "train.py").write_text(HUGE.format(layers))  # 36 or 48 GiB
    done = dry_run("--world", 8, "--card", "H200", "--json", "report.json", "train.py")
    assert done.status == status, done.stderr
    found = json.loads((tmp_path / "report.json").read_text())["memory_by_kind"]
    assert found["parameters"] == found["communication"] == layers * 2**32
    assert "activations" not in found or found["activations"] < 2**30


@pytest.mark.parametrize("way", ["print", "a child", "in a loop, not flushed"])
def test_a_report_on_stdout_stands_alone(dry_run, tmp_path, way):
    """What the program prints is on stderr, where a person can read it."""
    prints = {
        "print": "print('said')",
        "a child": "import subprocess; subprocess.run(['echo', 'said'])",
        "in a loop, not flushed": "import sys; sys.__stdout__.write('said\\n')",
    }
    (tmp_path / "train.py").write_text(f"{prints[way]}\n{TRAIN}")
    done = dry_run("--world", 8, "--json", "-", "train.py")
    assert json.loads(done.stdout)["fits"] is True
    assert "said" in done.stderr.splitlines()


def test_programs_hear_that_a_script_failed(dry_run, tmp_path):
    (tmp_path / "train.py").write_text("raise OSError('no data')")
    done = dry_run("--world", 8, "--json", "-", "train.py")
    assert done.status == 1
    assert json.loads(done.stdout) == {"fits": None, "error": "OSError: no data"}


PIECES = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
{}
"""
REFUSED = {
    "a shape that depends on values": (
        "x = torch.randn(4096, device='cuda')\nx[x > 0]",
        "index, whose shape depends on values that a dry run does not know "
        "(pieces.py:10), is not simulated. `simgpu --gpus` runs it with values",
    ),
    "a message to a rank that does not run": (
        "x = torch.ones(4, device='cuda')\ndist.send(x, (rank + 4) % ranks)",
        "rank 0 sends to rank 4, which does not run in this dry run (pieces.py:10). If "
        "ranks differ, as the stages of a pipeline do, let one of each kind run: "
        "--kinds pp=4 for four stages, or the ranks themselves, --kinds 0,4.",
    ),
    "an object of a rank that does not run": (
        "found = [None]\ndist.broadcast_object_list(found, src=3)",
        "rank 0 calls broadcast_object_list for what rank 3 has, which does not run in "
        "this dry run (pieces.py:10); let both run: --kinds 0,3",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_dry_run_cannot_know(dry_run, tmp_path, what):
    lines, said = REFUSED[what]
    (tmp_path / "pieces.py").write_text(PIECES.format(lines))
    done = dry_run("--world", 8, "pieces.py")
    assert done.status == 1 and said in done.stderr, done.stderr


STAGES = """
stage, each = rank // 4, 4
model = torch.nn.Linear(256 * (1 + stage), 256 * (2 + stage), device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    x = torch.ones(64, 256 * (1 + stage), device="cuda")
    if stage:
        shape = torch.zeros(2, dtype=torch.int64, device="cuda")
        dist.recv(shape, rank - each)
        x = torch.empty(*shape.tolist(), device="cuda")
        dist.recv(x, rank - each)
    y = model(x)
    if stage == 0:
        dist.send(torch.tensor(y.shape, device="cuda"), rank + each)
        dist.send(y.detach(), rank + each)
    y.sum().backward()
    optimizer.step()
"""


def test_stages_run_in_processes_that_meet(dry_run, tmp_path):
    (tmp_path / "pieces.py").write_text(PIECES.format(STAGES))
    words = ["--world", 8, "--kinds", "pp=2", "--rank", 1, "--json", "-"]
    done = dry_run(*words, "pieces.py")
    assert done.status == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ranks"] == [1, 5] and len(found["kinds"]) == 2
    peaks = [kind["peak_bytes"] for kind in found["kinds"]]
    assert found["peak_bytes"] == max(peaks) == peaks[1] > peaks[0]
    # products of 256 x 512 and of 512 x 768, forward and for the weight, by two cards
    flops = 2 * 2 * 64 * (256 * 512 + 512 * 768) / 2
    assert found["mfu"] == pytest.approx(flops / found["step_seconds"] / 989.4e12)
    received = found["kinds"][1]["exposed_by_group"]
    assert list(received) == ["recv, rank 1 to rank 5"]


def test_a_stage_that_fails_ends_the_others(dry_run, tmp_path):
    lines = "assert rank < 4, 'of the second stage'\ndist.barrier()"
    (tmp_path / "pieces.py").write_text(PIECES.format(lines))
    done = dry_run("--world", 8, "--kinds", "pp=2", "pieces.py")
    assert done.status == 1
    lines = done.stderr.strip().splitlines()
    assert "rank 4:" in lines and lines[-1] == "AssertionError: of the second stage"
    assert "simgpu/_" not in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_leaves_nothing(tmp_path):
    lines = (
        "open(f'{rank}', 'w').write(str(os.getpid()))\n__import__('time').sleep(10_000)"
    )
    (tmp_path / "pieces.py").write_text(PIECES.format(lines))
    words = ["dry-run", "--world", "8", "--kinds", "pp=2", "pieces.py"]
    running = subprocess.Popen(
        [sys.executable, "-m", "simgpu", *words], cwd=tmp_path, text=True,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    late = time.monotonic() + SHORT
    ranks = [tmp_path / "0", tmp_path / "4"]
    while not all(path.exists() and path.read_text() for path in ranks):
        assert time.monotonic() < late and running.poll() is None
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    assert running.communicate(timeout=SHORT)[1].endswith(
        "simgpu dry-run: interrupted\n"
    )
    assert running.returncode == 130
    for path in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)
