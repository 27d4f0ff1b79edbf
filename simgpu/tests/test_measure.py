"""`simgpu measure`, on simulated GPUs: the constants that they have come out again."""

import dataclasses
import functools
import json
import os
import runpy
import subprocess
import sys
import types

import pytest
import torch

import simgpu
from simgpu._device import measured
from simgpu._device.cards import CARDS, Card, Host, find_card
from simgpu._measure import command, figures, fit, links, timing
from simgpu._timing.topology import Network, Topology
from support.limits import JOB

NEAR = 1e-3  # of a constant that comes out again
MINE = dataclasses.replace(
    CARDS["A100"], name="My Card", multi_processors=100, l2_cache=30 * 2**20,
    flops={dtype: 0.8 * rate for dtype, rate in CARDS["A100"].flops.items()},
    memory_bandwidth=1.4e12, pcie_bandwidth=50e9, nvlink_bandwidth=270e9,
    host=Host(launch=6e-6, start=9e-6, copy=7e-6, copy_bandwidth=5e9),
)  # fmt: skip
NETWORK = Network(20e9, 30e-6)


def write(folder, card, name: str = "my.json", links: bool = True):
    """The file of a card, and of its links and network."""
    path = folder / name
    options = command.read([str(path)])
    command._rehearse(options, {"world": 2, "node": 2, "card": card}, links=False)
    if links:
        job = {"world": 4, "node": 2, "card": card, "network": NETWORK}
        command._rehearse(options, job, links=True)
    return path


@pytest.fixture(scope="module")
def few():
    """Fewer runs: on simulated GPUs all of them are alike."""
    patch = pytest.MonkeyPatch()
    patch.setattr(timing, "RUNS", 3)
    patch.setattr(timing, "WARM_UP", 1)
    patch.setattr(links, "COUNT", 2)
    patch.setattr(links, "TIMES", 2)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def mine(few, tmp_path_factory):
    return write(tmp_path_factory.mktemp("mine"), MINE)


def compare(found: Card, card: Card) -> None:
    """Every constant came out."""
    for name in (field.name for field in dataclasses.fields(Card)):
        ours, its = getattr(found, name), getattr(card, name)
        if name == "flops":
            for dtype, rate in its.items():
                reached = ours[dtype] * found.reached[dtype]
                assert reached == pytest.approx(rate * card.reached[dtype], rel=NEAR)
        elif name == "reached":
            assert ours["attention"] == pytest.approx(its["attention"], rel=NEAR)
        elif name == "host":
            host = its or Host(10e-6, 15e-6, 10e-6, 10e9)
            assert ours == pytest.approx(host, rel=1e-2)
        elif isinstance(its, float):
            assert ours == pytest.approx(its, rel=NEAR), name
        else:
            assert ours == its, name


# -- what comes out --------------------------------------------------------------------


def test_the_constants_of_a_card_of_ones_own_come_out(mine):
    compare(find_card(str(mine)), MINE)
    found = Topology(find_card(str(mine)), 2, 2, str(mine)).network
    assert found.bandwidth == pytest.approx(NETWORK.bandwidth, rel=NEAR)
    assert found.latency == pytest.approx(NETWORK.latency, rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", CARDS)
def test_the_constants_of_each_card_come_out(few, tmp_path, name):
    path = write(tmp_path, name)
    compare(find_card(str(path)), CARDS[name])
    assert measured.read(path)["like"] == name


def test_the_file_has_figures_in_the_formats_of_recordings(mine):
    data = json.loads(mine.read_text(encoding="utf-8"))
    assert data["hardware"] == "My Card (simulated)" and data["simulated"]
    assert data["card_name"] == "My-Card" and data["like"] == "A100"
    assert data["memory"]["context"] > 400 * 2**20
    assert data["memory"]["cublas_workspace"] == 8519680
    assert data["links"]["nccl_buffers"] > 100 * 2**20
    assert data["launch"] == pytest.approx(6e-6)
    kinds = set(figures.COLUMNS) | {"nccl_tests", "nccl_nodes"}
    assert set(data["recordings"]) == kinds
    for recording in data["recordings"].values():
        assert recording["what"] and recording["card"] == "My-Card"
        assert len(recording["spread"]) == len(recording["rows"]) > 0
        assert all(row[0] == "My-Card" for row in recording["rows"])
    assert not [key for key in data if "date" in key or "host" in key]
    rows = data["recordings"]["nccl_tests"]["rows"]
    ours = simgpu.estimate_collective("all_gather", 2**30, 2, MINE).seconds
    (row,) = (row for row in rows if row[1:4] == ["all_gather", 2, 2**30])
    assert row[4] == pytest.approx(1e6 * ours, rel=1e-4)
    assert {row[1] for row in rows} == set(links._COLLECTIVES)


def test_measuring_again_keeps_what_is_not_measured_again(mine, tmp_path, capsys):
    path = tmp_path / "my.json"
    path.write_bytes(mine.read_bytes())
    before = measured.read(path)
    assert command.main(["--fit", str(path)]) == command.OK
    after = measured.read(path)
    assert after["card"] == before["card"] and after["network"] == before["network"]
    assert "20.0 GB/s" in capsys.readouterr().out
    with pytest.raises(ValueError, match="is of My Card .simulated., and this is"):
        write(tmp_path, "T4", links=False)
    assert measured.read(path) == after


def test_links_alone_are_no_card_unless_it_is_known(few, tmp_path):
    options = command.read([str(tmp_path / "links.json")])
    job = {"world": 2, "node": 2, "card": MINE}
    command._rehearse(options, job, links=True)
    with pytest.raises(ValueError, match="has no card: it was not measured"):
        find_card(tmp_path / "links.json")
    options = command.read([str(tmp_path / "known.json")])
    other = dataclasses.replace(CARDS["A100"], nvlink_bandwidth=200e9)
    command._rehearse(options, job | {"card": other}, links=True)
    found = find_card(tmp_path / "known.json")
    assert found.nvlink_bandwidth == pytest.approx(200e9, rel=NEAR)
    assert found.flops == CARDS["A100"].flops and found.host is None


def test_a_card_is_like_the_one_of_its_name_or_generation():
    def like(name, *capability, processors=100):
        return fit.nearest({"name": name, "capability": capability,
                            "multi_processors": processors})  # fmt: skip

    assert like("NVIDIA A100-SXM4-80GB", 8, 0) == "A100"
    assert like("NVIDIA A10", 8, 6, processors=72) == "A10G"
    assert like("NVIDIA H100 PCIe", 9, 0, processors=114) == "H100-PCIE"
    assert like("GeForce GTX 1080", 6, 1) == "V100"


# -- what it is for --------------------------------------------------------------------

SCRIPT = """
import torch
x = torch.ones(2**20, device="cuda")
start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
torch.cuda.synchronize()
start.record()
y = x + x
end.record()
torch.cuda.synchronize()
print(torch.cuda.get_device_name(), round(1e3 * start.elapsed_time(end)))
"""
TRAIN = """
import os, torch
import torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = torch.nn.Linear(2048, 2048).cuda()
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(256, 2048, device="cuda")).sum().backward()
    optimizer.step()
"""
SECONDS = 6e-6 + 9e-6 + 1.5e-6 + 3 * 4 * 2**20 / (0.86 * MINE.memory_bandwidth)
SAYS = f"My Card (simulated) {round(1e6 * SECONDS)}"


def run(folder, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "simgpu", *words], cwd=folder, capture_output=True,
        text=True, timeout=JOB, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_start_and_estimate_take_the_file(mine, stopped):
    simgpu.start(1, card=str(mine))
    assert torch.cuda.get_device_name() == "My Card (simulated)"
    simgpu.stop()
    with torch.device("meta"):
        x = torch.ones(2**20)
    cost = simgpu.estimate(lambda x: x + x, x, card=str(mine))
    assert cost.seconds == pytest.approx(SECONDS, rel=1e-3)
    assert cost.host_seconds == pytest.approx(6e-6, rel=1e-3)
    seconds = simgpu.estimate_collective(
        "all_reduce", 2**30, 4, str(mine), nodes=2, network=str(mine)
    ).seconds
    ours = simgpu.estimate_collective("all_reduce", 2**30, 4, MINE, 2, NETWORK).seconds
    assert seconds == pytest.approx(ours, rel=1e-3)


def test_a_copy_takes_what_was_measured(mine):
    copy = simgpu.costs.copy_seconds
    card = find_card(str(mine))
    assert copy(None, card, 2**20, False) == pytest.approx(7e-6 + 2**20 / 5e9, rel=1e-2)
    assert copy(None, CARDS["A100"], 0, True) == simgpu.costs.COPY_LATENCY


def test_ranks_take_the_file(mine, tmp_path, monkeypatch):
    monkeypatch.chdir(mine.parent)
    with simgpu.Ranks(1, card="my.json", network="my.json") as ranks:
        assert "My Card" in str(ranks._gpus)
        found = ranks.run(_name)
    assert found == ["My Card (simulated)"]


def _name() -> str:
    return torch.cuda.get_device_name()


@pytest.mark.long
@pytest.mark.slow
def test_the_commands_take_the_file(mine, tmp_path):
    (tmp_path / "one.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "my.json").write_bytes(mine.read_bytes())
    files = ("--card", "my.json", "--network", "my.json")
    done = run(tmp_path, "--gpus", "1", *files, "one.py")
    assert done.stdout.strip() == SAYS, done.stderr
    done = run(tmp_path, "--gpus", "2", *files, "torchrun", "--standalone",
               "--nproc-per-node=2", "one.py")  # fmt: skip
    assert done.stdout.split("\n")[:2] == [SAYS, SAYS], done.stderr
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    done = run(tmp_path, "dry-run", "--world", "4", "--node", "2", *files, "train.py")
    assert done.returncode == 0, done.stderr
    assert "on My Card, simulated" in done.stdout
    done = run(tmp_path, "sweep", "--world", "4", "--node", "2", *files,
               "train.py {1,2}")  # fmt: skip
    assert done.returncode == 0, done.stderr
    there = {name: str(tmp_path / "my.json") for name in ("card", "network")}
    ours = {"card": MINE, "network": NETWORK}
    script, words = str(tmp_path / "train.py"), {"world": 4, "node": 2}
    seconds = simgpu.dry_run(script, 1, **words, **there).step_seconds
    function = functools.partial(runpy.run_path, script)
    exact = simgpu.dry_run(function, **words, **ours).step_seconds
    assert seconds == pytest.approx(exact, rel=1e-2)


# -- the command -----------------------------------------------------------------------


def test_a_simulated_gpu_of_a_command_is_measured_without_values(tmp_path):
    done = run(tmp_path, "--gpus", "1", "--card", "T4", "-m", "simgpu", "measure")
    assert done.returncode == 0, done.stderr
    assert "written to T4.json: --card T4.json" in done.stdout
    assert find_card(tmp_path / "T4.json").memory_bandwidth == pytest.approx(320e9)


@pytest.mark.slow
def test_links_of_simulated_ranks_are_measured(tmp_path):
    done = run(tmp_path, "--gpus", "2", "--card", "V100", "torchrun", "--standalone",
               "--nproc-per-node=2", "-m", "simgpu", "measure", "v.json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written to v.json") == 1
    assert find_card(tmp_path / "v.json").nvlink_bandwidth == pytest.approx(150e9)


def test_it_takes_no_longer_than_it_may(few, tmp_path):
    with pytest.raises(command.CannotMeasure, match="in 1e-09 s; give --seconds"):
        command._rehearse(command.read(["--seconds", "1e-9", str(tmp_path / "x.json")]),
                          {"card": "A100"}, links=False)  # fmt: skip
    budget = timing.Budget(100)
    assert 85 < budget.left <= 90
    budget.end = 0
    assert budget.left == 0
    with pytest.raises(timing.OutOfTime):
        budget.check()


def test_a_figure_is_the_median_with_its_spread():
    found = timing.of([5.0, 1.0, 2.0, 3.0, 4.0])
    assert found.seconds == 3 and found.least == 1
    assert found.spread == pytest.approx((4.6 - 1.4) / 3)


@pytest.mark.parametrize(
    ("cuda", "gpus", "here", "says"),
    [
        (None, 0, 0, "is built without CUDA"),
        ("13.0", 0, 0, "finds no GPU here .* --simulated A100"),
        ("13.0", 4, 8, "8 ranks on 4 GPUs: each needs its own; give .*=4"),
    ],
)
def test_what_cannot_be_measured_is_said(cuda, gpus, here, says):
    torch = types.SimpleNamespace(
        __version__="2.13", version=types.SimpleNamespace(cuda=cuda),
        cuda=types.SimpleNamespace(device_count=lambda: gpus),
    )  # fmt: skip
    with pytest.raises(command.CannotMeasure, match=says):
        command._check(torch, here)


def test_one_rank_alone_has_no_links(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert command.main([]) == command.FAILED
    assert "one rank alone has no links" in capsys.readouterr().err


def test_a_command_line_that_cannot_be_is_refused(capsys):
    for words, says in {
        "--fit": "of which file", "--seconds 0": "it takes more",
        "--world 2": "go with --simulated", "no-folder/x.json": "there is no folder",
    }.items():  # fmt: skip
        with pytest.raises(SystemExit) as error:
            command.main(words.split())
        assert error.value.code == command.WRONG and says in capsys.readouterr().err


# -- files that cannot be read ---------------------------------------------------------


def test_a_file_that_is_not_one_is_refused(mine, tmp_path):
    good = json.loads(mine.read_text(encoding="utf-8"))

    def refuses(data, says, read=find_card):
        path = tmp_path / "x.json"
        text = data if isinstance(data, str) else json.dumps(data)
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=says):
            read(str(path))

    def network(path):
        return Topology(MINE, 2, 2, path)

    refuses("{", "x.json is no JSON")
    for other in ([1], {"kind": "other"}):
        refuses(other, "is not a file that `simgpu measure` has written")
    refuses(good | {"version": 9}, "has version 9 of its format; simgpu .* version 1")
    refuses(good | {"simgpu": "0.1"}, "simgpu 0.1 has fitted .* measure --fit ")
    refuses(good | {"card": {"name": "x"}}, "no constants of a card .*--fit")
    refuses(good | {"card": good["card"] | {"new": 1}}, "no constants of a card")
    refuses(good | {"network": {"speed": 1}}, "no constants of a network", network)
    del good["network"]
    refuses(good, "has no network: it was not measured; .* several machines", network)
    with pytest.raises(ValueError, match="No such file"):
        find_card(tmp_path / "nix.json")
