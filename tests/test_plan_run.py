"""`plan_run.py`: lesson 27's planner, run unmodified and compared with what counts."""

import json
import re
import statistics
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from layouts.rows import HOSTS
from recorded.files import is_fitted
from scripts import plan_run
from scripts.plan_run import MODELS, Model, Plan, messages, peak_bytes, step_seconds
from scripts.small_llama import Llama
from support.limits import JOB
from tests import take_home
from tests.launching import NOTEBOOKS, ROOT

pytestmark = pytest.mark.slow
RECORDINGS = ROOT / "simgpu" / "tests" / "recordings"

COUNTS = {  # from the models' pages
    "1B": 1_235_814_400,
    "7B": 6_738_415_616,
    "8B": 8_030_261_248,
    "70B": 70_553_706_496,
    "405B": 405_853_388_800,
}
TINY = Model(2, 32, 4, 2, 48, 50)
GPT = Model(32, 4096, 32, 32, 16384, 50368, gated=False)


def sent(model, plan) -> dict[str, float]:
    return {name: nbytes for name, nbytes, *_ in messages(model, plan)}


# -- the script ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> str:
    """Of one plan. `test_choose_a_layout.py` runs the lesson's own command."""
    plan = "70B --gpus=64 --shard=64 --sequences=4 --network=400"
    bill = "--total=1e9 --price=3"
    command = f"python plan_run.py {plan} {bill}"
    return take_home.run_command(command, tmp_path_factory.mktemp("plan"))


def test_the_script_prints_what_its_functions_return(printed):
    model = MODELS["70B"]
    plan = Plan(64, 64, sequences=4, network=400)
    for name, nbytes in peak_bytes(model, plan).items():
        assert re.search(rf"^{name} +{nbytes / 2**30:.2f} GiB$", printed, re.M)
    for name, seconds in step_seconds(model, plan).items():
        assert re.search(rf"^{name} +{seconds:.3f} s$", printed, re.M)
    tokens, mfu = plan_run.rate(model, plan)
    assert f"{tokens:,.0f}, MFU {mfu:.1%}" in printed
    assert "70,553,706,496 parameters on 64 H100" in printed
    days, dollars = plan_run.bill(64, tokens, 1e9, 3)
    assert f"{days:,.1f} days, {dollars:,.0f} dollars" in printed


# -- what can be counted ---------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_a_module(name):
    with torch.device("meta"):
        model = Llama(MODELS[name])
    counted = sum(p.numel() for p in model.parameters())
    assert plan_run.parameters(MODELS[name]) == counted == COUNTS[name]


def test_parameters_of_a_gpt_are_those_of_a_module():
    with torch.device("meta"):
        counted = sum(p.numel() for p in Llama(GPT).parameters())
    assert plan_run.parameters(GPT) == counted


def test_a_router_and_its_experts_are_counted():
    dense, sparse = TINY, replace(TINY, experts=4)
    more = 2 * (3 * 3 * 32 * 48 + 4 * 32)
    assert plan_run.parameters(sparse) == plan_run.parameters(dense) + more


def test_a_tiny_llama_looks_back_only():
    torch.manual_seed(0)
    model = Llama(TINY)
    tokens = torch.randint(0, 50, (1, 8))
    before = model(tokens)
    tokens[0, 5] = (tokens[0, 5] + 1) % 50
    after = model(tokens)
    torch.testing.assert_close(after[0, :5], before[0, :5])
    assert not torch.allclose(after[0, 5:], before[0, 5:])


def test_computing_twice_changes_no_gradient():
    tokens = torch.randint(0, 50, (2, 8))
    gradients = []
    for again in (False, True):
        torch.manual_seed(0)
        model = Llama(TINY, again)
        model(tokens).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for once, twice in zip(*gradients, strict=True):
        torch.testing.assert_close(once, twice)


@pytest.mark.parametrize("tokens", [512, 2048])
def test_flops_are_those_that_pytorch_counts(tokens):
    with torch.device("meta"):
        model = Llama(MODELS["1B"], again=False)
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, tokens, dtype=torch.int64))
    matmuls, scores = plan_run.flops(MODELS["1B"], Plan(1, tokens=tokens))
    assert tokens * (matmuls + 2 * scores) == counter.get_total_flops()


def test_sharing_experts_changes_no_bytes_of_states():
    sparse = replace(MODELS["7B"], experts=8, active=2)
    one, eight = (plan_run.state_bytes(sparse, Plan(64, 64, ep=n)) for n in (1, 8))
    assert (
        one == eight == pytest.approx(16 * plan_run.parameters(sparse) / 64, rel=1e-3)
    )


def test_slices_divide_activations_and_stages_do_not():
    def kept(**split):
        return plan_run.kept_bytes(MODELS["70B"], Plan(64, microbatches=8, **split))

    assert kept(pp=8) == kept(pp=2) == kept()
    assert kept(tp=8) < kept() / 4
    # L (1 + (p - 1) / (p v)) layers: https://arxiv.org/abs/2205.05198
    interleaved = plan_run.kept_bytes(
        MODELS["70B"], Plan(64, microbatches=16, pp=8, chunks=2)
    )
    assert interleaved == pytest.approx(kept() * (1 + 7 / 16))
    assert kept(shard=8, cp=8) == kept() / 8


# Trains one step with tensors that have no memory, as rank 0 of many, and prints the
# peak that PyTorch's own FSDPMemTracker counts. Private names: those of 2.11 and 2.13
TRACK = """
import json, os, sys
import torch
import torch.distributed as dist
from scripts.plan_run import Model
from scripts.small_llama import Llama, loss_of, shard
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


class LocalAdamW(torch.optim.Optimizer):  # two moments, no temporaries, as if fused
    def __init__(self, parameters):
        super().__init__(parameters, {})
        for p in self.param_groups[0]["params"]:
            for name in ("one", "two"):
                self.state[p][name] = torch.zeros_like(p.to_local())

    def step(self):
        pass


for sizes, gpus, sequences, tokens, again in json.load(sys.stdin):
    store = FakeStore()
    dist.init_process_group("fake", rank=0, world_size=gpus, store=store)
    with torch.device("meta"):
        model = Llama(Model(**sizes), again)
    shard(model, mesh=init_device_mesh("cpu", (gpus,)))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        optimizer = LocalAdamW(model.parameters())
        x = torch.zeros(sequences, tokens, dtype=torch.int64)
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((x,))
        with tracker:
            loss_of(model, x, x).backward()
            optimizer.step()
            optimizer.zero_grad()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    print(peak["Total"], flush=True)
    dist.destroy_process_group()
os._exit(0)
"""
JOBS = [  # full width, few blocks: model, blocks, GPUs, sequences, tokens, again
    ("GPT", 6, 64, 4, 2048, False),
    ("70B", 5, 64, 1, 4096, True),
    ("70B", 5, 1024, 2, 4096, True),
    ("7B", 6, 8, 1, 2048, False),
    ("8B", 6, 1024, 2, 512, True),
    ("1B", 16, 8, 2, 4096, True),
]


@pytest.mark.long
def test_memory_is_near_what_pytorchs_tracker_counts():
    """At most a fifth too much: all gradients are counted, early ones are not there."""
    jobs = []
    for name, layers, *job in JOBS:
        sizes = replace(GPT if name == "GPT" else MODELS[name], layers=layers)
        jobs.append([vars(sizes), *job])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRACK], input=json.dumps(jobs),
        capture_output=True, text=True, timeout=JOB, cwd=NOTEBOOKS,
    )  # fmt: skip
    counted = [int(line) for line in done.stdout.split()]
    assert len(counted) == len(jobs), done.stderr[-2000:]
    for (sizes, gpus, sequences, tokens, again), peak in zip(
        jobs, counted, strict=True
    ):
        plan = Plan(gpus, gpus, sequences=sequences, tokens=tokens, again=float(again))
        predicted = sum(peak_bytes(Model(**sizes), plan).values())
        print(f"{predicted / 1e9:.2f} GB, tracked {peak / 1e9:.2f}")
        assert 0.95 < predicted / peak < 1.2


# -- messages --------------------------------------------------------------------------


@pytest.mark.parametrize("shard", [1, 64])
def test_ddp_and_fsdp_send_eight_bytes_for_each_parameter(shard):
    found = sum(sent(MODELS["70B"], Plan(64, shard)).values())
    assert found == pytest.approx(8 * COUNTS["70B"] * 63 / 64, rel=0.01)


def test_hybrid_sharding_averages_a_shard_over_machines():
    found = sent(MODELS["70B"], Plan(64, 8))
    average = 2 * 4 * COUNTS["70B"] / 8 * 7 / 8
    assert found["average copies"] == pytest.approx(average, rel=1e-3)
    assert found["gather weights"] == pytest.approx(4 * COUNTS["70B"] * 7 / 8, rel=0.02)


def test_hybrid_sharding_averages_in_each_backward_and_hides_it():
    once, four = (Plan(64, 8, microbatches=n, network=400) for n in (1, 4))
    average = sent(MODELS["8B"], once)["average copies"]
    assert sent(MODELS["8B"], four)["average copies"] == 4 * average
    copies = plan_run.weight_messages(MODELS["8B"], once)[2]
    alone = plan_run.weight_messages(MODELS["8B"], replace(once, shard=1))[2]
    assert copies[-1] is True and alone[-1] is False


def test_weights_that_stay_gathered_are_sent_once_a_step():
    again = sent(MODELS["8B"], Plan(64, 64, microbatches=4))
    once = sent(MODELS["8B"], Plan(64, 64, microbatches=4, reshard=False))
    assert again["scatter gradients"] == 4 * once["scatter gradients"]
    assert again["gather weights"] == pytest.approx(
        8 * once["gather weights"], rel=0.08
    )


def test_tokens_travel_as_the_other_lessons_counted():
    model = replace(MODELS["8B"], layers=8)
    plain = dict(again=0.0, tokens=1024)
    row = 2 * 1024 * model.dim  # bytes of a sequence between two blocks
    found = sent(model, Plan(4, tp=4, **plain))
    # forward and backward, each two gathers and two scatters of a block
    assert found == {"slices of layers": 2 * 4 * 8 * row * 3 / 4}
    found = sent(model, Plan(4, 4, cp=4, **plain))
    # keys and values, a quarter as wide as queries, of the full sequence
    assert found["keys and values"] == 2 * 8 * (2 * row / 4) * 3 / 4
    found = sent(model, Plan(4, pp=4, microbatches=8, **plain))
    assert found == {"to next stage": 2 * 8 * row}
    sparse = replace(model, experts=8, active=2)
    found = sent(sparse, Plan(4, 4, ep=4, **plain))
    assert found["tokens to experts"] == 2 * 8 * 2 * 2 * row * 3 / 4


def test_a_ring_through_machines_is_bound_by_their_network_cards():
    slow = Plan(64, 64, network=1)
    seconds = plan_run.message_seconds(slow, 1e12, 0, 64, 1)
    assert seconds == pytest.approx(1e12 / (0.9 * 8 * 1e9 / 8))
    across = plan_run.message_seconds(slow, 1e12, 0, 8, 8)
    assert across == pytest.approx(8 * seconds)
    inside = plan_run.message_seconds(slow, 1e12, 0, 8, 1)
    assert inside == pytest.approx(1e12 / (0.57 * 450e9))


def test_latency_grows_with_the_ring():
    plan = Plan(1024, 1024, network=400)
    one, many = (plan_run.message_seconds(plan, 0, 1, n, 1) for n in (8, 1024))
    assert one == pytest.approx(15e-6 + 7 * 0.8e-6)
    assert many == pytest.approx(15e-6 + 1023 * 0.8e-6 + 128 * 27e-6)


@pytest.mark.parametrize("fitted, near", [(True, 0.75), (False, 0.75)])
def test_messages_in_a_machine_take_what_nccl_tests_recorded(fitted, near):
    text = (RECORDINGS / "nccl_tests.json").read_text("utf-8")
    found = []
    for row in json.loads(text)["rows"]:
        card, name, ranks, nbytes, microseconds = row
        is_ring = name in ("all_gather", "reduce_scatter")
        if card in plan_run.CARDS and is_ring and 2**20 <= nbytes <= 2**29:
            if is_fitted(row) == fitted:
                sent = plan_run.ring(nbytes, ranks)
                plan = Plan(ranks, card=card)
                seconds = plan_run.message_seconds(plan, sent, 1, ranks, 1)
                found.append(1e6 * seconds / microseconds)
    assert len(found) > 50 and 0.95 < statistics.median(found) < 1.05
    assert sum(1 / 1.3 <= ratio <= 1.3 for ratio in found) >= near * len(found)


# -- seconds ---------------------------------------------------------------------------


def test_more_stages_idle_longer_and_more_microbatches_shorter():
    assert plan_run.bubble(Plan(8, pp=8, microbatches=16)) == 7 / 16
    assert plan_run.bubble(Plan(8, pp=8, microbatches=16, chunks=2)) == 7 / 32
    assert plan_run.bubble(Plan(8, 8)) == 0


def test_hidden_messages_cost_only_what_sticks_out():
    fast, slow = (
        step_seconds(MODELS["7B"], Plan(64, 64, network=n)) for n in (400, 10)
    )
    assert fast["messages"] == 0 < slow["messages"]
    assert fast["computing"] == slow["computing"]


def test_a_step_takes_the_longer_of_card_and_host():
    plan = Plan(8, tp=8, microbatches=4, again=0, host="slow")
    slow = step_seconds(MODELS["8B"], plan)
    fast = step_seconds(MODELS["8B"], replace(plan, sequences=8))
    assert slow["host"] > 0 == fast["host"]
    card = slow["computing"] + slow["messages"]
    both = plan_run.host_seconds(MODELS["8B"], plan)
    assert card + slow["host"] == pytest.approx(both)


def test_the_host_launches_every_pass_and_calls_every_message():
    model, (launch, call) = MODELS["8B"], plan_run.HOSTS["fast"]
    plan = Plan(8, tp=8, microbatches=4, again=0)
    launches = 24 * (4 * 2 + 1) * 33
    calls = 4 * 4 * 2 * 32
    assert plan_run.host_seconds(model, plan) == pytest.approx(
        launches * launch + calls * call
    )


def test_constants_of_the_host_are_those_of_the_simulator():
    for name, host in plan_run.HOSTS.items():
        assert HOSTS[name] == host


@pytest.mark.parametrize(
    "model, plan, what",
    [
        (MODELS["7B"], Plan(8, 8, host="old"), "the host old"),
        (MODELS["7B"], Plan(64, 64), "the network between machines"),
        (MODELS["7B"], Plan(8, 8, card="B200"), "the card B200"),
        (MODELS["7B"], Plan(8, 8, numbers="float8"), "the speed in float8"),
        (MODELS["7B"], Plan(8, 8, compiled=True), "compiled kernels"),
        (MODELS["7B"], Plan(8, 8, tokens=131072), "sequences of 131,072 tokens"),
        (replace(TINY, experts=4), Plan(8, 8), "how evenly the router fills"),
    ],
)
def test_it_says_when_it_does_not_know(model, plan, what):
    with pytest.raises(ValueError, match=f"^not known: .*{what}"):
        step_seconds(model, plan)


@pytest.mark.parametrize(
    "words, said",
    [
        ("--gpus=64 --shard=64", ["not known: the network between machines"]),
        (
            "--gpus=8 --shard=8 --card=L40S",
            ["room of the card: not known", "not known: the card L40S"],
        ),
    ],
)
def test_the_command_line_says_when_it_does_not_know(words, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plan_run.py", "7B", *words.split()])
    plan_run.main()
    printed = capsys.readouterr().out
    assert all(each in printed for each in said)
    assert "L40S" not in words or "fit" not in printed  # it does not judge


def test_a_card_whose_shares_are_missing_is_refused(monkeypatch):
    monkeypatch.setitem(plan_run.CARDS, "H200", (989.4e12, 4.8e12, 450e9, 151e9))
    with pytest.raises(ValueError, match="^not known: the shares that H200 reaches$"):
        step_seconds(MODELS["7B"], Plan(8, 8, card="H200"))


def test_choices_fit_and_are_sorted():
    found = plan_run.choices(MODELS["70B"], 64, 1024, network=400)
    rates = [tokens for (tokens, _), _ in found]
    assert rates == sorted(rates, reverse=True)
    for _, plan in found:
        assert sum(peak_bytes(MODELS["70B"], plan).values()) < 0.9 * 85e9
        data = 64 // (plan.tp * plan.pp)
        assert plan.sequences * plan.microbatches * data == 1024
    assert {plan.chunks for _, plan in found} == {1, 2, 4, 8}
    assert any(1 < plan.shard < 64 // (plan.tp * plan.pp) for _, plan in found)


def test_choices_need_the_network(capsys):
    words = "70B --gpus=64 --choose".split()
    with pytest.raises(SystemExit, match="not known: the network between machines"):
        plan_run.main(words)
    plan_run.main([*words, "--network=400", "--price=1"])
    printed = capsys.readouterr().out.splitlines()
    assert [line[:22].strip() for line in printed[1:]] == [
        "FSDP", "HSDP", "FSDP + slices", "FSDP + stages", "FSDP + slices + stages"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "words, said",
    [
        ("70B --gpus=64 --chunks=4 --again=0", "its own --again, --chunks: leave out"),
        ("70B --gpus=64 --cp=4", "its own --cp: leave out"),
        ("70B --gpus=8", "nothing fits 70B on 8 GPUs: the least is 137 GiB"),
        ("70B --gpus=64 --batch=0", "nothing fits 70B on 64 GPUs: change --batch"),
    ],
)
def test_what_cannot_be_chosen_says_what_to_do(words, said):
    with pytest.raises(SystemExit, match=said):
        plan_run.main([*words.split(), "--choose", "--network=400"])


@pytest.mark.parametrize(
    "words, said",
    [
        ("--again=50", "--again is a share of the blocks, from 0 to 1"),
        ("--network=-1", "--network is in Gbit/s"),
        ("--chunks=2", "--chunks needs --pp"),
        ("--pp=8 --shard=1 --chunks=2 --microbatches=9", "which divides --microb"),
        ("--pp=8 --shard=1 --chunks=8 --microbatches=8", "32 blocks are too few"),
        ("--ep=8", "1 cannot be divided by 8 .the experts by --ep"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(words, said):
    with pytest.raises(SystemExit, match=said):
        plan_run.main(["8B", "--gpus=8", "--shard=8", *words.split()])


def test_the_layout_of_llama_3_is_none_of_them(capsys):
    words = "--gpus=16384 --shard=128 --tp=8 --pp=16 --chunks=8 --microbatches=16"
    plan_run.main(["405B", *words.split(), "--network=400", "--again=0"])
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("word, is_kept", [("false", True), ("No", True), ("1", False)])
def test_what_is_said_of_reshard_is_understood(word, is_kept, capsys):
    plan_run.main(["8B", "--gpus=8", "--shard=8", f"--reshard={word}"])
    assert (" in 33 messages" in capsys.readouterr().out.split("scatter")[0]) == is_kept
    with pytest.raises(SystemExit):
        plan_run.main(["8B", "--gpus=8", "--reshard=sometimes"])


def test_all_plans_have_the_batch_that_was_asked_for():
    found = plan_run.choices(MODELS["70B"], 64, 1000, network=400)
    for _, plan in found:
        data = 64 // (plan.tp * plan.pp)
        assert plan.sequences * plan.microbatches * data == 1000
