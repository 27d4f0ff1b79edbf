"""A dry run from Python and in pytest: the report, its pictures, its errors."""

import gc
import json
import multiprocessing
import os
import pickle
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import simgpu

SCRIPT = """
import sys
import torch
from torch import nn
batch = int(sys.argv[1])
model = nn.Sequential(nn.Embedding(256, 512), nn.Linear(512, 256)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randint(0, 256, (batch, 128), device="cuda")
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
"""
KEYS = {
    "fits", "peak_bytes", "reserved_bytes", "total_bytes", "step_seconds",
    "compute_seconds", "exposed_seconds", "host_seconds", "tokens_per_second", "mfu",
    "unknown_reads",
}  # fmt: skip


def train(batch: int = 2, width: int = 512) -> None:
    """Three steps of DDP on a rank."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = nn.Sequential(nn.Embedding(256, width), nn.Linear(width, 256)).cuda()
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        x = torch.randint(0, 256, (batch, 128), device="cuda")
        F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def pipeline() -> None:
    """Two stages, of which the second one computes four times as much."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(1 + 3 * rank)]).cuda()
    x = torch.randn(16, 256, device="cuda")
    stage = PipelineStage(model, rank, 2, torch.device("cuda", rank))
    schedule = ScheduleGPipe(stage, 4, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank else {}))
        optimizer.step()
        optimizer.zero_grad()


def test_a_function_runs_as_one_of_64_ranks_and_nothing_stays():
    report = simgpu.dry_run(train, world=64)
    assert report.world == 64 and report.ranks == [0] and report.fits
    parameters = 2 * 256 * 512 + 256
    by_kind = report.memory_by_kind
    assert parameters * 4 <= by_kind["parameters"] <= parameters * 4 + 1024
    # two states, and what a step takes beside them while it runs
    assert parameters * 12 <= by_kind["optimizer"] <= parameters * 12 + 4096
    assert report.tokens == 2 * 128 * 64
    assert report.tokens_per_second == report.tokens / report.step_seconds
    assert not simgpu.is_running() and not dist.is_initialized()
    assert "WORLD_SIZE" not in os.environ


def test_more_samples_take_more_memory_and_two_nodes_more_time():
    small, large = (simgpu.dry_run(train, n, world=8) for n in (2, 8))
    assert large.peak_bytes > small.peak_bytes
    far = simgpu.dry_run(train, 2, world=16, network="10 Gbit/s")
    assert far.peak_bytes == small.peak_bytes
    assert far.exposed_seconds > small.exposed_seconds
    assert list(far.exposed_by_group) == ["all_reduce, all ranks"]


def test_what_does_not_fit_is_a_report():
    report = simgpu.dry_run(train, 4096, 4096, world=8, memory="600MB")
    assert not report.fits and report.binds == "memory"
    assert "out of memory" in report.error
    assert "does not fit" in report._repr_html_()
    assert report.memory_picture()._repr_svg_().startswith("<svg")
    assert report.timeline().ranks == [0]


def fragmented() -> None:
    """10 MiB keep a segment of 100 MiB; then 110 are asked for."""
    mib = 2**20
    torch.empty(100 * mib, dtype=torch.uint8, device="cuda")
    kept = torch.empty(10 * mib, dtype=torch.uint8, device="cuda")
    torch.empty(110 * mib, dtype=torch.uint8, device="cuda")
    del kept


def test_segments_grow_where_the_environment_says_so(monkeypatch):
    assert not simgpu.dry_run(fragmented, world=2, memory="200MB").fits
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    report = simgpu.dry_run(fragmented, world=2, memory="200MB")
    assert report.fits and report.reserved_bytes == 120 * 2**20


def test_other_simulated_gpus_go_on_beside_it():
    alone = simgpu.dry_run(train, world=8)
    simgpu.start(2)
    try:
        tensor = torch.ones(3, device="cuda:1")
        report = simgpu.dry_run(train, world=8)
        assert (tensor + 1).tolist() == [2, 2, 2] and simgpu.count() == 2
    finally:
        simgpu.stop()
    assert report.as_dict() == alone.as_dict()


def sharded(groups: int, fails: bool = False) -> None:
    """Slices and shards of DTensors, behind so many groups; the norm is of all."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    for _ in range(groups):
        dist.new_group([0, 7])
    mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("shards", "tp"))
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).cuda()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(),
                                           "2": RowwiseParallel()})  # fmt: skip
    fully_shard(model, mesh=mesh["shards"])
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.rand(8, 512, device="cuda")
    both = distribute_tensor(x, mesh, [Shard(0), Shard(1)])
    for _ in range(3):
        both.redistribute(placements=[Replicate(), Replicate()]).sum().to_local()
        model(x).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        if fails:
            raise ArithmeticError
        optimizer.step()
        optimizer.zero_grad()


def test_a_dtensor_meets_no_mesh_of_an_earlier_dry_run():
    alone = simgpu.dry_run(sharded, 0, world=8).as_dict()
    with pytest.raises(ArithmeticError):
        simgpu.dry_run(sharded, 40, True, world=8)
    # names of groups are numbers: some of those are gone, others have other ranks now
    for groups in (0, 40, 3):
        assert simgpu.dry_run(sharded, groups, world=8).as_dict() == alone


def uneven(rows: list[int]) -> None:
    """Add how many of five rows a rank has, whose nodes have three and two."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh("cuda", (2, 4))
    x = distribute_tensor(torch.rand(5, 7, device="cuda"), mesh, [Shard(0), Shard(0)])
    rows.append(len(x.redistribute(placements=[Shard(0), Replicate()]).to_local()))


def test_another_rank_has_its_own_part_of_a_dtensor():
    rows: list[int] = []
    for rank in (0, 7, 0):
        simgpu.dry_run(uneven, rows, world=8, node=4, rank=rank)
    assert rows == [3, 2, 3]


def test_pictures_show_the_last_step_and_the_memory_of_all():
    report = simgpu.dry_run(train, world=8)
    log = report.timeline()
    assert log.seconds == pytest.approx(report.step_seconds)
    names = {event.name.split()[0] for event in log.events(0)}
    assert {"addmm", "all_reduce"} <= names
    assert min(event.start for event in log.events(0)) >= 0
    picture = report.memory_picture()
    for kind in report.memory_by_kind:
        assert kind in picture.title
    assert len(report.drawn.course.ends) == 3 and report.drawn.course.ends[-1] == 1
    moments = report.drawn.course.moments
    assert max(sum(its.values()) for its in moments) == report.peak_bytes
    html = report._repr_html_()
    shown = re.sub("<[^>]*>", " ", html)
    assert "rank 0 of 8 on NVIDIA H100" in shown and "optimizer" in shown
    assert "color: inherit" in html and "white" not in html


def test_the_json_has_what_programs_need_and_no_pictures():
    report = simgpu.dry_run(train, world=8)
    values = json.loads(json.dumps(report.as_dict()))
    assert values.keys() >= KEYS and "drawn" not in values
    assert pickle.loads(pickle.dumps(report)).drawn == report.drawn


def test_ranks_are_forked_before_there_is_a_store(monkeypatch):
    """Its thread may hold a lock of the C library, which a forked process keeps."""
    made, alive = dist.TCPStore, []

    def store(*args, **options):
        if options["is_master"]:
            alive.append(len(multiprocessing.active_children()))
        return made(*args, **options)

    monkeypatch.setattr(dist, "TCPStore", store)
    simgpu.dry_run(pipeline, world=2, kinds="pp=2", tokens=16)
    assert alive == [2]


def test_stages_are_on_one_axis():
    report = simgpu.dry_run(pipeline, world=2, kinds="pp=2", tokens=16)
    assert [its.ranks for its in report.kinds] == [[0], [1]]
    log = report.timeline()
    assert log.ranks == [0, 1]
    first, second = (sum(event.flops for event in log.events(rank)) for rank in (0, 1))
    assert second > 3 * first > 0
    assert log._repr_svg_().count("rank 1") >= 1
    titles = [report.memory_picture(rank).title for rank in (0, 1)]
    assert titles[0].startswith("Memory of rank 0") and titles[0] != titles[1]
    assert report.memory_picture().title == titles[1]
    with pytest.raises(ValueError, match="rank 2 did not run"):
        report.memory_picture(2)


@pytest.mark.slow
def test_a_script_runs_in_a_process_of_its_own(tmp_path, simulated_dry_run):
    script, trace = tmp_path / "train.py", tmp_path / "trace.json"
    script.write_text(SCRIPT)
    report = simulated_dry_run(script, 4, world=64, network=50e9, timeline=trace)
    assert report.peak_bytes < 2**30 and report.tokens == 4 * 128 * 64
    assert report.unknown_reads == [{"line": "train.py:14", "value": 1.0, "times": 2}]
    assert json.loads(trace.read_text())["traceEvents"]
    with pytest.raises(ValueError, match="nothing to draw"):
        report.timeline()
    gc.collect()  # what other tests have left is not of this run
    with warnings.catch_warnings(record=True) as left:
        warnings.simplefilter("always", ResourceWarning)
        assert not simulated_dry_run(script, 2**14, world=8, memory="1GB").fits
        gc.collect()
    assert not [str(it.message) for it in left if it.category is ResourceWarning]


@pytest.mark.slow
def test_a_script_that_fails_says_why(tmp_path, simulated_dry_run):
    script = tmp_path / "train.py"
    script.write_text("raise KeyError('lr')\n")
    with pytest.raises(simgpu.DryRunFailed, match="KeyError: 'lr'"):
        simulated_dry_run(script, world=8)
    script.write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(simgpu.DryRunFailed, match="longer than 3 s"):
        simulated_dry_run(script, world=8, seconds=3)  # the limit is what is tested
    with pytest.raises(ValueError, match="no script"):
        simulated_dry_run(tmp_path / "other.py", world=8)


def fails(batch: int = 1) -> None:
    dist.init_process_group("nccl")
    raise KeyError("lr")


def test_an_error_of_a_function_is_raised_and_nothing_stays():
    with pytest.raises(KeyError, match="lr"):
        simgpu.dry_run(fails, world=8)
    with pytest.raises(ValueError, match="no rank 64"):  # more in test_dry_command.py
        simgpu.dry_run(train, world=64, rank=64)
    assert not simgpu.is_running() and not dist.is_initialized()
    assert simgpu.dry_run(train, world=8).fits


def test_a_process_group_that_is_there_is_an_error():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="has a process group"):
            simgpu.dry_run(train, world=8)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
