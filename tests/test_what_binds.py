"""Script of lesson 08, what_binds.py: kinds of kernels, messages, peaks, verdicts.

What its own command prints is in `test_take_home.py` and
`test_scripts_of_one_process.py`.
"""

import re
import sys

import pytest
import torch

import simgpu
from tests import take_home
from tests.launching import load, simulated

pytestmark = pytest.mark.slow


def test_messages_over_a_slow_link_bind_a_step_of_ddp(tmp_path):
    command = take_home.command_for("08", "2 ranks")
    slow = command.replace("--gpus 2", "--gpus 2 --nodes 2 --network 1Gbit/s")
    printed = take_home.run_command(slow, tmp_path)
    assert printed.splitlines()[-1].startswith("communication-bound")
    longest = r"ncclDevKernel_AllReduce_Sum_f32\S* .* message\n"
    assert re.match(longest, printed)
    shares = [int(share) for share in re.findall(r" x +(\d+)%  ", printed)]
    assert len(shares) == 8 and 90 < sum(shares) <= 101  # they are rounded
    took = int(re.search(r"step takes (\d+) µs", printed)[1])
    alone = int(re.search(r"(\d+) µs of it alone", printed)[1])
    assert 0.5 * took < alone < took


def test_a_card_without_a_peak_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["what_binds.py"])
    with simulated(1):
        assert load("what_binds.py").PEAK == 19.5e12
        # the names of the last three hold those of an A100, a T4 and an H200
        for name in ("RTX 9999", "RTX A1000", "NVIDIA T400 4GB", "NVIDIA H200 NVL"):
            monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
            with pytest.raises(SystemExit, match=f"no peak is known of {name}"):
                load("what_binds.py")


@pytest.fixture
def script(monkeypatch):
    """The script as a module; its functions only are called."""
    monkeypatch.setattr(sys, "argv", ["what_binds.py"])
    with simulated(1):
        yield load("what_binds.py")


def test_its_peaks_are_those_of_the_simulated_cards(script):
    for card in simgpu.CARDS.values():
        rows = script.PEAKS.items()  # found by whole words, as in the script
        found = [p for key, p in rows if re.search(rf"\b{key}\b", card.name)]
        why = f"{len(found)} rows for {card.name}, one is right"
        assert len(found) == 1, f"PEAKS in notebooks/scripts/what_binds.py: {why}"
        (peaks,) = found
        wanted = [card.flops[kind] / 1e12 for kind in script.NUMBERS]
        assert list(peaks) == pytest.approx(wanted, rel=1e-3)


KINDS = {
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL": "message",
    "ncclDevKernel_Broadcast_RING_LL": "message",
    "broadcast": "message",
    "Memcpy HtoD (Pageable -> Device)": "copy",
    "ampere_sgemm_128x64_tn": "FLOPs",
    "triton_tem_fused_addmm_relu_0": "FLOPs",
    "triton_poi_fused_addmm_relu_0": "rest",
    "triton_per_fused_convolution_mean_1": "rest",
    "triton_red_fused_mm_sum_2": "rest",
    "void at::native::vectorized_elementwise_kernel<4>": "rest",
    "vectorized_elementwise_kernel": "rest",
}


def test_names_of_kernels_say_what_they_do(script):
    assert {name: script.kind_of(name) for name in KINDS} == KINDS


def test_a_compiled_model_is_timed_and_profiled_compiled(script, monkeypatch):
    """On the CPU: torch.compile is not simulated. After a count it runs eagerly."""
    simgpu.stop()
    runs = []

    def backend(graph, inputs):
        def run(*arguments):
            runs.append(graph)
            return graph.forward(*arguments)

        return run

    model, x = torch.compile(torch.nn.Linear(4, 2), backend=backend), torch.ones(3, 4)

    def compiled_runs():
        before = len(runs)
        script.step()
        return len(runs) - before

    found = []
    monkeypatch.setattr(script, "step", lambda: model(x).sum().backward())
    monkeypatch.setattr(script, "microseconds_of_a_step", compiled_runs)
    monkeypatch.setattr(script, "profiled", lambda: (compiled_runs(), []))
    monkeypatch.setattr(script, "report", lambda *values: found.extend(values))
    script.main()
    timed, profiled, _, flops = found
    assert timed == profiled == 1
    assert flops == 2 * (2 * 3 * 4 * 2)  # x needs no gradient


def test_a_message_is_exposed_where_no_kernel_runs(script):
    assert script.alone([(0, 10)], [(2, 4), (3, 6)]) == 6


@pytest.mark.parametrize(
    "took, flops, rest, exposed, of_peak, word",
    [
        (100, 50, 40, 0, 0.6, "compute-bound"),
        (100, 50, 40, 0, 1.1, "faster than the peak: are these float32? Say"),
        (100, 20, 20, 0, 1.1, "faster than the peak"),  # whatever else binds
        (100, 20, 70, 30, 1.1, "faster than the peak"),
        (100, 50, 40, 0, 0.2, "memory-bound, or many small"),
        (100, 20, 70, 0, 0.6, "memory-bound, as a rule: most"),
        (100, 20, 20, 0, 0.6, "launch-bound"),
        (100, 30, 30, 30, 0.6, "communication-bound"),
        (100, 50, 20, 15, 0.6, "compute-bound"),
    ],
)
def test_the_verdict(script, took, flops, rest, exposed, of_peak, word):
    times = {"FLOPs": flops, "rest": rest, "copy": 0, "message": exposed}
    said = script.verdict(took, times, exposed, of_peak * script.PEAK)
    assert said.startswith(word)


def test_a_step_that_mostly_copies_is_no_step_of_small_kernels(script):
    times = {"FLOPs": 20, "rest": 10, "copy": 60, "message": 0}
    assert script.verdict(100, times, 0, 0.5 * script.PEAK).startswith("copy-bound")
