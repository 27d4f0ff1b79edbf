"""Operations give on a simulated GPU what they give on the CPU, and there.

Each call runs on the CPU without the simulator, then with every input on cuda:1:
values, dtypes and gradients must be equal and every tensor on cuda:1, also in
inference mode, where PyTorch hands composite operations over whole. The list favours
operations for which PyTorch's C++ makes tensors of its own.
"""

import numpy as np  # noqa: F401, for the expressions below
import pytest
import torch
import torch.nn.functional as F  # noqa: F401
from torch import nn  # noqa: F401
from torch.utils._pytree import tree_leaves

import simgpu


def inputs(device: str) -> dict[str, torch.Tensor]:
    """The same tensors on any device; `x` and `y` want gradients."""
    draw = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.rand(shape, generator=draw).add(0.1).to(device)

    return {
        "x": rand(3, 4).requires_grad_(), "y": rand(3, 4).requires_grad_(),
        "s": rand(4, 4).requires_grad_(), "b": rand(2, 3, 4).requires_grad_(),
        "im": rand(1, 2, 6, 6).requires_grad_(), "w": rand(2, 2, 3, 3).requires_grad_(),
        "v": rand(8).requires_grad_(), "i": torch.tensor([2, 0, 1], device=device),
        "g": torch.tensor([[2, 0, 1, 0]], device=device),
    }  # fmt: skip


CALLS = [
    # arithmetic
    "x + y", "x - y * 2 / 3", "x ** 2", "x ** y", "2 ** x", "x.detach() // 0.3",
    "x % 0.3", "-x",
    # types, views, in place
    "x.double()", "x.half()", "x.to(torch.int)", "x.type(torch.float64)", "x > 0.5",
    "x[0]", "x.T", "x[:, 1:]", "x.flatten()", "x.unsqueeze(0)", "x.data", "x.detach()",
    "x.diagonal()", "x.clone().add_(1)", "x.clone().mul_(2).zero_()",
    # with numbers and indices of the host
    "x + torch.tensor(2.0)", "torch.tensor(2.0) * x", "x / torch.tensor(2.0)",
    "x > torch.tensor(0.5)", "torch.pow(x, torch.tensor(2.0))",
    "torch.tensor(1.0) + v.sum()", "torch.where(x > 0.5, x, torch.tensor(2.0))",
    "torch.where(x > 0.5, 1.0, 0.0)", "x.clamp(min=x.new_tensor(0.5))",
    "x.masked_fill(x > 0.5, torch.tensor(2.0))", "torch.maximum(x, torch.tensor(0.5))",
    "x[torch.tensor([0])]", "x[[0, 1]]", "x[np.array([0])]", "s[torch.eye(4) > 0]",
    # over dimensions
    "x.sum()", "x.sum(0, keepdim=True)", "x.mean(1)", "x.prod()", "x.prod(1)",
    "x.std()", "x.var(0)", "torch.std_mean(x)", "x.norm()", "x.max()", "x.max(1)",
    "x.min(0)", "x.amax(1)", "x.median()", "x.median(0)", "x.mode(0)", "x.kthvalue(2)",
    "x.nanmedian()", "x.quantile(0.3)",
    "x.quantile(torch.tensor([0.1, 0.9]).to(x.device), dim=1)", "x.argmax(1)",
    "x.cumsum(0)", "x.cumprod(1)", "x.cummax(0)", "x.logcumsumexp(1)", "x.logsumexp(1)",
    "x.softmax(1)", "x.log_softmax(0)",
    # in order
    "x.sort(1)", "x.argsort(0)", "x.topk(2)", "x.detach().unique()",
    "x.detach().round(decimals=1).unique(return_inverse=True, return_counts=True)",
    "torch.unique_consecutive(i)",
    # chosen elements
    "(x > 0.5).nonzero()", "torch.where(x > 0.5)", "torch.where(x > 0.5, x, y)",
    "torch.where(x > 0.5, x, 0.0)", "x.masked_select(x > 0.5)",
    "x.masked_fill(x > 0.5, 2.0)", "x.masked_scatter(x > 0.5, y)", "x[i]", "x[i, i]",
    "x[x > 0.5]", "x[:, None, 1:]", "x[..., -1]", "x.index_select(0, i)",
    "x.index_add(0, i, y)", "x.index_copy(0, i, y)", "x.index_fill(0, i, 3.0)",
    "x.index_put((i,), y)", "x.gather(0, g)", "x.scatter(0, g, y[:1])",
    "x.scatter_add(0, g, y[:1])", 'x.scatter_reduce(0, g, y, "amax")', "x.take(i)",
    "x.take_along_dim(g)", "x.put(i, y[0, :3])",
    # joined, cut, turned
    "torch.cat([x, y])", "torch.cat([x, y], 1)", "torch.stack([x, y])",
    "torch.hstack([x, y])", "x.chunk(2, 1)", "x.chunk(2, 1)[1]", "x.split([1, 2])",
    "x.split([1, 2])[0]", "x.unbind()", "x.unbind()[2]", "x.tensor_split(2, 1)",
    "x.repeat(2, 2)", "x.tile(2)", "x.repeat_interleave(2, 0)",
    "x.repeat_interleave(i, 0)", "x.expand(2, 3, 4)", "x.roll(1, 0)", "x.flip(0)",
    "x.rot90()", "x.tril()", "x.triu(1)", "x.diag()", "torch.diag_embed(x)",
    "x.trace()", "x.unfold(1, 2, 1)", "torch.block_diag(x, y)",
    "torch.cartesian_prod(v[:2], v[2:4])", "torch.combinations(v[:3])",
    'torch.meshgrid(v[:2], v[2:4], indexing="ij")',
    # products
    "x @ s", "x.t() @ y", "b @ s", 'torch.einsum("ij,kj->ik", x, y)',
    'torch.einsum("bij,jk->bik", b, s)', "torch.bmm(b, b.transpose(1, 2))",
    "torch.baddbmm(b[:, :, :3], b, b.transpose(1, 2))", "torch.addmm(x, x, s)",
    "torch.outer(v, v)", "torch.dot(v, v)", "torch.mv(x, v[:4])",
    "torch.tensordot(x, y, 2)", "torch.kron(x, y)", "torch.cdist(x, y)", "F.pdist(x)",
    "torch.cross(x[:, :3], y[:, :3], dim=1)",
    # linear algebra
    "torch.linalg.inv(s)", "torch.linalg.solve(s, s + 1)", "torch.linalg.det(s)",
    "torch.linalg.slogdet(s)",
    "torch.linalg.cholesky(s @ s.T + torch.eye(4, device=s.device))",
    "torch.linalg.qr(s)[1].abs()", "torch.linalg.svdvals(s)",
    "torch.linalg.eigvalsh(s + s.T)", "torch.linalg.eig(s)[0].abs().sort()[0]",
    "torch.linalg.matrix_rank(s)", "torch.linalg.matrix_rank(s[:, :0])",
    "torch.linalg.matrix_norm(s)", "torch.linalg.vector_norm(x, 3)",
    "torch.linalg.pinv(x)", "torch.linalg.lstsq(s.double(), y.T.double()).solution",
    "torch.linalg.matrix_exp(s)", "torch.linalg.matrix_power(s, 3)",
    "torch.linalg.lu_factor(s)", "torch.linalg.multi_dot([x, s, s])",
    # statistics
    "torch.trapezoid(x)", "torch.diff(x)", "torch.gradient(v)", "torch.corrcoef(x)",
    "torch.cov(x)", "torch.renorm(x, 2, 0, 1.0)", "torch.histc(x.detach(), 4)",
    "torch.histogram(v.detach().cpu(), 4)[0].to(v.device)", "torch.bincount(i)",
    "torch.bincount(i, minlength=6)",
    "torch.searchsorted(v.sort()[0].detach(), x.detach())",
    "torch.bucketize(x.detach(), v.sort()[0].detach())",
    "torch.isin(i, torch.tensor([0, 1]).to(i.device))", "torch.isclose(x, y)",
    # element by element
    "torch.clamp(x, 0.2, 0.8)", "torch.clamp(x, min=y)", "torch.lerp(x, y, 0.3)",
    "torch.addcmul(x, x, y)", "torch.copysign(x, -y)", "torch.nan_to_num(x)",
    "torch.special.erf(x)", "torch.sgn(x)", "torch.polygamma(1, x)",
    "torch.atan2(x, y)", "torch.nextafter(x.detach(), y.detach())",
    # Fourier transforms, complex numbers
    "torch.fft.fft(x).abs()", "torch.fft.rfft2(s).abs()",
    "torch.fft.irfft(torch.fft.rfft(x))", "torch.fft.hfft2(torch.fft.fft(s), s=(4, 4))",
    "torch.fft.fftshift(x)",
    "torch.stft(v, 4, window=v.new_ones(4), return_complex=True).abs()",
    "torch.view_as_real(torch.complex(x, y).conj() * 2)", "torch.polar(x, y).angle()",
    # layers
    "F.one_hot(i, 4)", "F.embedding(i, x)", "F.embedding_bag(g, x)[0]",
    "F.embedding_bag(i, x, torch.zeros(1, dtype=torch.long, device=x.device))",
    "F.linear(x, s, s[0])", "F.bilinear(x, y, torch.ones(2, 4, 4, device=x.device))",
    "F.conv1d(b, torch.ones(2, 3, 2, device=b.device))", "F.conv2d(im, w, padding=1)",
    "F.conv2d(im, w, w[0, 0, 0, :2], stride=2, dilation=2)",
    "F.conv_transpose2d(im, w, stride=2)", "F.max_pool2d(im, 2)",
    "F.max_pool2d(im, 2, return_indices=True)", "F.avg_pool2d(im, 2)",
    "F.adaptive_avg_pool2d(im, 3)", "F.adaptive_max_pool2d(im, 2)",
    "F.lp_pool2d(im, 2, 2)",
    "F.fractional_max_pool2d(im, 2, 3, _random_samples=im.new_ones(1, 2, 2) / 2)",
    "F.interpolate(im, scale_factor=2)",
    'F.interpolate(im, size=(4, 5), mode="bilinear")',
    'F.interpolate(im, scale_factor=2, mode="bicubic", align_corners=True)',
    "F.pad(im, (1, 2))", 'F.pad(im, (1, 1, 2, 2), mode="reflect")', "F.unfold(im, 2)",
    "F.fold(F.unfold(im, 2), (6, 6), 2)", "F.pixel_shuffle(im.repeat(1, 2, 1, 1), 2)",
    "F.pixel_unshuffle(im, 2)", "torch.narrow_copy(x.detach(), 1, 1, 2)",
    "F.grid_sample(im, im.new_zeros(1, 3, 3, 2) + 0.2, align_corners=False)",
    "F.affine_grid(b[:1, :2, :3], (1, 2, 4, 4), align_corners=False)",
    "F.batch_norm(x, None, None, training=True)", "F.layer_norm(x, (4,), s[0], s[1])",
    "F.rms_norm(x, (4,))", "F.rms_norm(b.transpose(0, 1), (2, 4), s[:2] + 1, 1e-3)",
    "F.rms_norm(x.bfloat16(), (4,), s[0].bfloat16())", "F.group_norm(im, 2)",
    "torch.func.vmap(lambda t: F.rms_norm(t, (4,)))(x)", "F.instance_norm(im)",
    "torch.func.jvp(lambda t: F.rms_norm(t, (4,)), (x,), (y,))",
    "F.local_response_norm(im, 2)", "F.normalize(x)", "F.cosine_similarity(x, y)",
    "F.pairwise_distance(x, y)",
    # activations
    "F.relu(x - 0.5)", "F.gelu(x)", "F.silu(x)", "F.elu(x - 0.5)", "F.mish(x)",
    "F.prelu(x - 0.5, v[:1])", "F.glu(x)", "F.softplus(x)", "F.hardswish(x)",
    "F.tanhshrink(x)", "F.logsigmoid(x)", "F.logsigmoid(x.bfloat16())",
    # losses
    "F.cross_entropy(x, i)",
    "F.cross_entropy(x, i, label_smoothing=0.1, weight=s[0].detach())",
    "F.cross_entropy(x, y.softmax(1))",
    'F.nll_loss(x.log_softmax(1), i, reduction="none")', "F.mse_loss(x, y)",
    'F.l1_loss(x, y, reduction="sum")', "F.smooth_l1_loss(x, y)", "F.huber_loss(x, y)",
    "F.binary_cross_entropy(x / 2, y.detach() / 2)",
    "F.binary_cross_entropy_with_logits(x, y.detach(), pos_weight=s[0].detach())",
    'F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean")',
    "F.hinge_embedding_loss(x, torch.ones_like(x))",
    "F.margin_ranking_loss(x, y, torch.ones_like(x))",
    "F.triplet_margin_loss(x, y, x * 2)", "F.multi_margin_loss(x, i)",
    "F.multilabel_margin_loss(x, torch.zeros_like(x, dtype=torch.long))",
    "F.cosine_embedding_loss(x, y, torch.ones_like(v[:3]))",
    "F.gaussian_nll_loss(x, y, x + 1)", "F.poisson_nll_loss(x, y)",
    "F.ctc_loss(x[:, None].log_softmax(2), g[:, :1] + 1, *torch.tensor([[3], [1]]))",
    # attention
    "F.scaled_dot_product_attention(b, b, b)",
    "F.scaled_dot_product_attention(b, b, b, is_causal=True)",
    "F.scaled_dot_product_attention(b, b, b, attn_mask=b[0, :, :3] > 0)",
    # lists and sparse tensors
    "nn.utils.rnn.pad_sequence([v[:2], v[:3]])",
    "torch.nn.utils.parameters_to_vector([x, y])", "x.to_sparse().to_dense()",
    "torch.sparse.mm(x.detach().to_sparse(), s)",
    "x.detach().to_sparse_csr().to_dense()", "torch._foreach_add([x, y], [y, x])",
    "torch._foreach_norm([x, y])",
    # transforms
    "torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)",
    "torch.func.vmap(torch.dot)(x, y)",
    "torch.func.grad(lambda t: (t.chunk(2)[0] ** 2).sum())(v)",
    "torch.func.jacrev(torch.sin)(v)", "torch.func.jvp(torch.sin, (v,), (v,))",
    "torch.autograd.functional.hessian(lambda t: (t**3).sum(), v[:2])",
]  # fmt: skip


def run(expression: str, device: str):
    """Results and gradients of one expression."""
    torch.manual_seed(3)
    names = inputs(device)
    out = eval(expression, globals(), names)
    results = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
    wanted = [t for t in results if t.requires_grad]
    if not wanted:
        return results, []
    leaves = [t for t in names.values() if t.requires_grad]
    total = sum((t * t).sum() for t in wanted)
    found = torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)
    total.backward()  # also into .grad
    for leaf, gradient in zip(leaves, found, strict=True):
        assert (leaf.grad is None) == (gradient is None)
        assert gradient is None or leaf.grad.device == gradient.device == leaf.device
    # + 0: a zero without memory, which some backwards return, crashes below any mode
    return results, [g + 0 for g in found if g is not None]


@pytest.fixture(scope="module")
def expected():
    """What the CPU says, computed before GPUs are simulated; then there are three."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert simgpu.count() == 0
    found = {expression: run(expression, "cpu") for expression in CALLS}
    simgpu.start(3)
    yield found
    simgpu.stop()
    torch.set_num_threads(threads)


def compare(expected: list, found: list) -> None:
    assert len(expected) == len(found)
    for a, b in zip(expected, found, strict=True):
        assert str(b.device) == "cuda:1"
        assert b.dtype is a.dtype and b.shape == a.shape and b.layout is a.layout
        torch.testing.assert_close(b.detach().cpu(), a.detach(), equal_nan=True)


@pytest.mark.filterwarnings("ignore:.*sparse:UserWarning")
@pytest.mark.parametrize("expression", CALLS)
def test_a_gpu_gives_what_the_cpu_gives(expected, expression):
    results, gradients = expected[expression]
    assert results
    found = run(expression, "cuda:1")
    compare(results, found[0])
    compare(gradients, found[1])
    if "func" in expression or "checkpoint" in expression:
        return  # these need gradients
    with torch.inference_mode():
        found = eval(expression, globals(), inputs("cuda:1"))
        found = [t for t in tree_leaves(found) if isinstance(t, torch.Tensor)]
        compare(results, found)


def test_results_of_an_expression_are_checked(expected):
    """The comparison above can fail."""
    a = torch.ones(2)
    for wrong in (a, a.to(0), a.to(1) + 1, a.to(1).double(), a.to(1)[:1]):
        with pytest.raises(AssertionError):
            compare([a], [wrong])
    compare([a], [a.to(1)])
