"""Products of half precision: added in float32, rounded once, on any CPU."""

import pytest
import torch
from torch.nn import functional as F

HALF = pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])


pytestmark = pytest.mark.simulated_gpus(1)


def some(*shape: int, half: torch.dtype) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape, device="cuda").to(half)


# name -> (function of tensors, shapes of these)
PRODUCTS = {
    "mm": (torch.mm, [(70, 130), (130, 50)]),
    "addmm": (torch.addmm, [(50,), (70, 130), (130, 50)]),
    "bmm": (torch.bmm, [(3, 20, 130), (3, 130, 9)]),
    "baddbmm": (torch.baddbmm, [(3, 20, 9), (3, 20, 130), (3, 130, 9)]),
    "mv": (torch.mv, [(70, 130), (130,)]),
    "addmv": (torch.addmv, [(70,), (70, 130), (130,)]),
    "linear": (F.linear, [(4, 20, 130), (50, 130), (50,)]),
    "convolution": (F.conv2d, [(2, 9, 12, 12), (5, 9, 3, 3), (5,)]),
    "attention": (F.scaled_dot_product_attention, [(2, 3, 17, 32)] * 3),
}


@HALF
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_the_one_in_float32_rounded_once(name, half):
    product, shapes = PRODUCTS[name]
    tensors = [some(*shape, half=half).requires_grad_() for shape in shapes]
    wide = [tensor.detach().float().requires_grad_() for tensor in tensors]
    out, expected = product(*tensors), product(*wide)
    assert out.dtype is half and out.device.type == "cuda"
    assert torch.equal(out, expected.to(half))
    out.sum().backward()
    expected.sum().backward()
    for tensor, its in zip(tensors, wide, strict=True):
        # of attention, the rounded output goes into the gradient
        exact = name != "attention"
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 0.02, "atol": 0.02}
        torch.testing.assert_close(tensor.grad, its.grad.to(half), **tolerance)


@HALF
def test_types_that_pytorch_does_not_mix_are_refused(half):
    with pytest.raises(RuntimeError, match="dtype"):
        torch.mm(some(4, 4, half=half), torch.ones(4, 4, device="cuda"))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.mm(some(4, 5, half=half), some(4, 5, half=half))


@HALF
def test_tensors_may_be_given_by_name(half):
    a, b = some(6, 7, half=half), some(7, 5, half=half)
    assert torch.equal(torch.ops.aten.mm(self=a, mat2=b), a @ b)
    bias = some(5, half=half)
    assert torch.equal(torch.addmm(bias, mat1=a, mat2=b), torch.addmm(bias, a, b))


@HALF
def test_a_given_result_is_written(half):
    a, b = some(6, 7, half=half), some(7, 5, half=half)
    out = torch.empty(6, 5, device="cuda", dtype=half)
    assert torch.mm(a, b, out=out) is out
    torch.testing.assert_close(out, a @ b)


@HALF
@pytest.mark.parametrize("name", ["mm", "addmm", "bmm", "baddbmm"])
def test_out_dtype_leaves_the_sum_unrounded(name, half):
    product, shapes = PRODUCTS[name]
    tensors = [some(*shape, half=half) for shape in shapes]
    expected = product(*map(torch.Tensor.float, tensors))
    found = product(*tensors, out_dtype=torch.float32)
    assert torch.equal(found, expected) and found.device == tensors[0].device
    out = torch.empty_like(expected)
    assert product(*tensors, out_dtype=torch.float32, out=out) is out
    assert torch.equal(out, expected)
    with pytest.raises(RuntimeError, match="same as input dtype or fp32 for fp16/bf16"):
        product(*tensors, out_dtype=torch.float64)


@HALF
def test_layer_norm_is_the_one_in_float32_rounded_once(half):
    tensors = [some(*shape, half=half) for shape in ((70, 130), (130,), (130,))]
    wide = [tensor.float().requires_grad_() for tensor in tensors]
    for tensor in tensors:
        tensor.requires_grad_()
    out = F.layer_norm(tensors[0], (130,), *tensors[1:])
    expected = F.layer_norm(wide[0], (130,), *wide[1:])
    assert torch.equal(out, expected.to(half))
    gradient = some(70, 130, half=half)
    out.backward(gradient)
    expected.backward(gradient.float())
    for tensor, its in zip(tensors, wide, strict=True):
        assert torch.equal(tensor.grad, its.grad.to(half))
    name = {torch.bfloat16: "BFloat16", torch.float16: "Half"}[half]
    words = f"expected scalar type {name} but found Float"
    with pytest.raises(RuntimeError, match=words):
        F.layer_norm(tensors[0], (130,), wide[1])
