"""Backward works in place where CUDA does: gradients are added up, zeros written to."""

import pytest
import torch

import simgpu

SIZE = 4096  # bytes of each tensor here


pytestmark = pytest.mark.simulated_gpus(1)


def leaf() -> torch.Tensor:
    return torch.linspace(0, 1, SIZE // 4).cuda().requires_grad_()


def allocations_of_backward(of, **options) -> int:
    """How many blocks backward takes from the first root to the leaf's gradient."""
    x = leaf()
    out = of(x).sum()
    count = torch.cuda.memory_stats()["allocation.all.allocated"]
    out.backward(**options)
    return torch.cuda.memory_stats()["allocation.all.allocated"] - count


def log_of_backward(of) -> list[str]:
    out = of(leaf()).sum()
    with simgpu.timeline().recording() as events:
        out.backward()
    return [event.name for event in events if event.kind == "kernel"]


def test_gradients_that_nobody_else_holds_are_added_in_place():
    one = allocations_of_backward(lambda x: x.sin())
    two = allocations_of_backward(lambda x: x.sin() * 3 + x.cos() * 2)
    parts = 2 * 3 + 1  # each: times 3 or 2, cosine or sine, product; minus the sine
    assert one == 3  # the root, cosine, product
    assert two == 1 + parts
    assert "add_" in log_of_backward(lambda x: x.sin() * 3 + x.cos() * 2)


def test_a_gradient_that_another_path_still_needs_is_not_written_over():
    def residual(x):
        return x + x.sin()  # its gradient is that of the sum, an expanded number

    assert "add" in log_of_backward(residual) and "add_" not in log_of_backward(
        residual
    )


def test_a_gradient_that_a_hook_keeps_is_not_written_over():
    kept = []

    def of(x, hook=None):
        y = x * 2
        sine, same = y.sin(), y.clone()
        if hook:
            same.register_hook(hook)
        return same * 3 + sine

    assert "add_" in log_of_backward(of)
    assert "add_" not in log_of_backward(lambda x: of(x, kept.append))
    before = torch.cuda.memory_allocated()
    assert kept.pop().eq(3).all()
    assert torch.cuda.memory_allocated() == before - SIZE


def test_sums_in_hooks_and_functions_of_the_program_are_new_tensors():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 1 + gradient

    def hooked(x):
        y = x * 1
        y.register_hook(lambda gradient: gradient * 1 + gradient)
        return y.sin()

    assert "add_" not in log_of_backward(lambda x: Twice.apply(x.sin()))
    assert "add_" not in log_of_backward(hooked)


def test_gradients_of_gradients_are_added_out_of_place():
    x = leaf()
    y = (x.sin() * 3 + x.cos() * 2).sum()
    with simgpu.timeline().recording() as events:
        torch.autograd.grad(y, x, create_graph=True)
    assert "add_" not in [event.name for event in events]


@pytest.mark.parametrize(
    "of, name",
    [
        (lambda x: x.view(32, 32).max(1)[0], "scatter_"),
        (lambda x: x.gather(0, torch.arange(9, device="cuda")), "scatter_add_"),
        (lambda x: x[torch.arange(9, device="cuda")], "index_put_"),
        (lambda x: x.index_select(0, torch.arange(9, device="cuda")), "index_add_"),
    ],
)
def test_formulas_write_into_their_own_zeros(of, name):
    assert name in log_of_backward(of)
    x = leaf()
    of(x).sum().backward()
    assert torch.cuda.memory_allocated() < 4 * SIZE


def test_values_are_those_of_the_cpu():
    def of(x):
        y = x * 2
        z = y.sin() * y + y.exp() * y.gather(0, torch.arange(1024, device=y.device))
        return (z + y.view(32, 32).max(1)[0].repeat(32)).sum()

    x = leaf()
    of(x).backward()
    on_cpu = x.detach().cpu().requires_grad_()
    of(on_cpu).backward()
    assert torch.equal(x.grad.cpu(), on_cpu.grad)


def test_the_block_lives_as_long_as_the_sum():
    x = leaf()
    y = x * 1
    y.retain_grad()
    (y.sin() * 3 + y.cos() * 2).sum().backward()
    before = torch.cuda.memory_allocated()
    y.grad = None
    assert torch.cuda.memory_allocated() == before - SIZE
