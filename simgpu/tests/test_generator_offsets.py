"""How far each kernel moves a generator's offset: by CUDA's grid, not by elements.

The figures are worked out by hand from PyTorch's sources, which `philox_offsets.py`
names: an A100 has 108 multiprocessors of 2048 threads, 221,184 in all.
"""

import pytest
import torch
import torch.nn.functional as F

import simgpu

THREADS = 108 * 2048


@pytest.fixture(autouse=True)
def gpus():
    simgpu.start(1, card="A100")
    yield
    simgpu.stop()


def on_gpu(*shape, **options):
    return torch.empty(*shape, device="cuda", **options)


def moved(draw) -> int:
    torch.cuda.manual_seed(0)
    draw()
    return torch.cuda.default_generators[0].get_offset()


@pytest.mark.parametrize(
    ("draw", "by"),
    [
        (lambda: torch.rand(1, device="cuda"), 4),
        (lambda: torch.rand(100, device="cuda"), 4),
        (lambda: torch.rand(0, device="cuda"), 0),
        (lambda: torch.rand(9), 0),  # on the host
        (lambda: on_gpu(9, dtype=torch.float64).normal_(), 4),
        (lambda: torch.randn(9, device="cuda", dtype=torch.complex64), 4),
        (lambda: on_gpu(9).exponential_(), 4),
        (lambda: F.dropout(on_gpu(100).zero_()), 4),
        (lambda: F.dropout(on_gpu(100).zero_(), inplace=True), 4),
        (lambda: F.dropout(on_gpu(100).zero_(), 1.0), 0),
        (lambda: F.dropout(on_gpu(100).zero_(), training=False), 0),
        (lambda: on_gpu(100).bernoulli_(), 4),
        (lambda: on_gpu(100).bernoulli_(on_gpu(100).zero_()), 12),
        (lambda: torch.bernoulli(on_gpu(100).zero_()), 12),
        (lambda: torch.poisson(on_gpu(3).zero_()), 20),
        (lambda: torch._standard_gamma(on_gpu(3).fill_(1)), 12),
        (lambda: torch.randperm(10, device="cuda"), 4 + 12),
        (lambda: torch.randperm(0, device="cuda"), 0),
        (lambda: torch.multinomial(on_gpu(5).fill_(1), 2), 4),
        (lambda: torch.multinomial(on_gpu(5).fill_(1), 9, replacement=True), 4),
        (lambda: F.rrelu(on_gpu(9).zero_(), training=True), 4),
        (lambda: F.rrelu(on_gpu(9).zero_()), 0),
        # the first tensor for which each thread must draw again
        (lambda: on_gpu(4 * THREADS).uniform_(), 4),
        (lambda: on_gpu(4 * THREADS + 1).uniform_(), 8),
        (lambda: on_gpu(10_000_000).uniform_(), 48),
        (lambda: on_gpu(2 * THREADS + 1, dtype=torch.float64).uniform_(), 8),
        (lambda: on_gpu(2 * THREADS + 1, dtype=torch.float16).uniform_(), 4),
        (lambda: on_gpu(2 * THREADS + 1, dtype=torch.complex64).normal_(), 8),
        (lambda: F.dropout(on_gpu(4 * THREADS + 1, dtype=torch.float16).zero_()), 8),
        # integers: from a range of 2^28 on, 64 bits for each
        (lambda: torch.randint(9, (2 * THREADS + 1,), device="cuda"), 4),
        (lambda: torch.randint(2**28, (2 * THREADS + 1,), device="cuda"), 8),
        (lambda: on_gpu(2 * THREADS + 1, dtype=torch.int64).random_(), 8),
        (lambda: on_gpu(2 * THREADS + 1, dtype=torch.int32).random_(), 4),
        (lambda: on_gpu(2 * THREADS + 1, dtype=torch.uint8).random_(3, None), 4),
    ],
)
def test_an_offset_moves_as_on_cuda(draw, by):
    assert moved(draw) == by


def test_attention_without_dropout_moves_nothing():
    q = on_gpu(1, 2, 8, 16, dtype=torch.float16).zero_()
    assert moved(lambda: F.scaled_dot_product_attention(q, q, q)) == 0


def test_a_smaller_card_has_fewer_threads():
    simgpu.stop()
    simgpu.start(1, card="T4")  # 40 multiprocessors of 1024 threads
    assert moved(lambda: on_gpu(4 * 40 * 1024 + 1).uniform_()) == 8
    assert moved(lambda: on_gpu(4 * 40 * 1024).uniform_()) == 4


def test_unequal_draws_of_one_grid_leave_equal_masks_behind():
    x = on_gpu(64).fill_(1)
    masks = []
    for drawn in (3, 500):
        torch.cuda.manual_seed(1)
        torch.rand(drawn, device="cuda")
        masks.append(F.dropout(x))
    assert torch.equal(*masks)
    torch.cuda.manual_seed(1)
    torch.rand(4 * THREADS + 1, device="cuda")
    assert not torch.equal(F.dropout(x), masks[0])


def test_a_tensor_of_2_gib_is_drawn_in_parts_too():
    from types import SimpleNamespace as Call

    from simgpu._device.cards import find_card
    from simgpu._dispatch.philox_offsets import increment

    numel = 2**29 + 2  # float32 beyond 2 GiB: two halves
    call = Call(operation=Call(name="uniform_"))
    out = torch.empty(numel, device="meta")
    each = lambda n: ((n - 1) // (THREADS * 4) + 1) * 4  # noqa: E731
    assert increment(call, out, find_card("A100")) == each(numel) + 2 * each(numel // 2)
