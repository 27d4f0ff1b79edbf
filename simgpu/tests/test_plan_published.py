"""Plans beside published runs in bfloat16, to which no constant is fitted.

Sources: NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary-archive.md of 25.11 and
a draft of it (1eaa55357) and examples/model_verification_cards (067f987df03b);
NVIDIA/Megatron-LM (d48bd6be0a85), examples/moe_recipes; NVIDIA-NeMo/Automodel
(36044ad3d139), docs/performance-summary.mdx; pytorch/torchtitan
(b5bcd76c66d0), torchtitan/components/quantization/nvfp4.md, and pull request 1690.
Figures only.

Megatron's kernels are Transformer Engine's, which fuse as compiled blocks do; routing
is forced to balance. Networks of 400 Gbit/s a card, 800 of GB300: assumed. In FLOP/s of
Megatron-LM a token has 147.9 GFLOP, as Megatron Bridge's rows say.
"""

from dataclasses import replace
from typing import NamedTuple

import pytest

from simgpu import plan
from simgpu._device.cards import CARDS, GIB
from simgpu._plan.layout import Layout

# "H100 95GiB", 500 W: Grand Teton's
TETON = replace(CARDS["H100"], total_memory=95 * GIB, memory_bandwidth=2400e9)
MOE = 147.9e-3  # TFLOP of a token


class Run(NamedTuple):
    card: object
    node: int  # cards that NVLink connects
    network: str  # of a node
    model: str
    sequence: int
    layout: Layout
    rate: float  # tokens/s of a GPU
    reserved: float | None = None  # GiB
    compiled: bool = True

    def planned(self):
        of = self.layout
        tokens = of.replicas * of.shards * of.micro * of.accumulate * self.sequence
        only = {
            "shards": [of.shards], "tp": [of.slices], "pp": [of.stages], "cp": [1],
            "ep": [of.spread], "chunks": [of.chunks], "micro": [of.micro],
            "zero": [of.zero], "recompute": [of.recompute],
        }  # fmt: skip
        found = plan(
            self.model, of.gpus, tokens=tokens, sequence=self.sequence, node=self.node,
            card=self.card, network=self.network, compile=self.compiled, only=only,
        )  # fmt: skip
        (row,) = found.layouts
        assert row.layout == of
        return row

    def share(self) -> float:
        """Our tokens/s over theirs."""
        row = self.planned()
        return row.tokens_per_second / self.layout.gpus / self.rate


QWEN = "qwen3-235b-a22b"
# replicas, shards, slices, stages, chunks, micro, accumulate, zero, recompute, spread
MEGATRON = {
    "8B, 16 H100": Run("H100", 8, "400 GB/s", "qwen3-8b", 4096, Layout(
        1, 16, 1, 1, 1, 1, 64, 1, "none"), 10456),
    "235B, 256 GB300": Run("GB300", 64, "6400 GB/s", QWEN, 4096, Layout(
        1, 64, 1, 4, 12, 2, 64, 1, "none", 16), 6131),
    "235B, 256 GB200": Run("GB200", 64, "3200 GB/s", QWEN, 4096, Layout(
        1, 32, 1, 8, 3, 1, 256, 1, "none", 32), 4916),
    "235B, 64 GB300, draft": Run("GB300", 64, "6400 GB/s", QWEN, 4096, Layout(
        1, 32, 2, 1, 1, 1, 32, 1, "none", 64), 4905),
    "235B, 64 GB200, draft": Run("GB200", 64, "3200 GB/s", QWEN, 4096, Layout(
        1, 8, 1, 8, 1, 1, 128, 1, "none", 8), 4668),
    "Moonlight, 16 H100": Run("H100", 8, "400 GB/s", "moonlight-16b-a3b", 4096, Layout(
        1, 16, 1, 1, 1, 2, 32, 1, "none", 8), 22528),
}  # fmt: skip
# Experts' messages go from node to node, in these runs once for each node that a token
# goes to and beside other work (HybridEP), in ours once for each expert. Two
# measurements of one recipe, which recomputes norms and the experts' activation
FAR = Layout(1, 16, 2, 8, 4, 1, 128, 1, "none", 32)
HYBRID = [
    Run("H100", 8, "400 GB/s", QWEN, 4096, FAR, tflops / MOE)
    for tflops in (214.3, 302.0)
]
# The same with DeepEP, in FSDP2: in our pipelines a rank has whole parameters
AUTOMODEL = Run("H100", 8, "400 GB/s", "kimi-k2", 4096, Layout(
    1, 32, 1, 8, 4, 1, 16, 1, "full", 32), 924)  # fmt: skip
TITAN = {
    # what is recomputed is not said: all of it is nearest in memory
    "8B, 4 GB200": Run("GB200", 4, "200 GB/s", "qwen3-8b", 2048, Layout(
        1, 4, 1, 1, 1, 16, 1, 3, "full"), 20913, 112.88),
    "32B, 8 H100": Run(TETON, 8, "400 GB/s", "qwen3-32b", 4096, Layout(
        1, 8, 1, 1, 1, 2, 1, 3, "full"), 1874, 81.85),
}  # fmt: skip
# In eight slices, not compiled: as slow with any number of sequences, and nobody
# said why; messages of sequences' parts are copied by DTensor
SLICES = {
    (shards, micro): Run(TETON, 8, "400 GB/s", "qwen3-32b", 4096, Layout(
        1, shards, 8, 1, 1, micro, 1, 3, "full"), rate, reserved, False)
    for shards, micro, rate, reserved in (
        (4, 16, 876, 43.45), (4, 32, 883, 70.79), (8, 32, 873, 63.27),
    )
}  # fmt: skip


@pytest.mark.parametrize("name", MEGATRON)
def test_rates_of_megatron_bridge_are_near(name):
    assert MEGATRON[name].share() == pytest.approx(1.0, abs=0.16)


@pytest.mark.parametrize("name", TITAN)
def test_rates_of_torchtitan_are_near_and_memory_is_less_than_reserved(name):
    run = TITAN[name]
    assert 1.2 < run.share() < 1.3
    assert 0.8 < run.planned().used_bytes / GIB / run.reserved < 0.91


def test_messages_of_experts_from_node_to_node_are_planned_too_slow():
    first, second = (run.share() for run in HYBRID)
    assert first == pytest.approx(0.84, abs=0.02)
    assert second == pytest.approx(0.60, abs=0.02)
    assert AUTOMODEL.share() == pytest.approx(0.71, abs=0.02)


@pytest.mark.parametrize("which", SLICES, ids=str)
def test_eight_slices_of_torchtitan_are_planned_too_fast(which):
    run = SLICES[which]
    assert run.share() == pytest.approx(1.84, abs=0.03)
    assert run.planned().used_bytes / GIB / run.reserved == pytest.approx(
        0.73, abs=0.02
    )


def test_of_the_slices_the_one_with_less_memory_is_named():
    one, two = SLICES[4, 32].planned(), SLICES[8, 32].planned()
    assert one.used_bytes > two.used_bytes
    assert SLICES[4, 32].reserved > SLICES[8, 32].reserved
