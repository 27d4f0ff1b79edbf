"""Autograd across devices, optimizers, layers, data loading: training as a whole."""

import functools
import inspect
import threading

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import simgpu
from simgpu import _runtime as runtime
from support.limits import SHORT


@pytest.fixture(autouse=True)
def gpus():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    simgpu.start(4)
    yield
    simgpu.stop()
    torch.set_num_threads(threads)


def where(*values) -> list[str]:
    return [str(value.device) for value in values]


# -- autograd --------------------------------------------------------------------------


def test_gradients_go_the_way_back():
    x = torch.ones(3, requires_grad=True)
    y = (x.to(1) * 2).to(2)
    (y.sum().to(0) * 3).backward()
    assert where(x.grad, y) == ["cpu", "cuda:2"] and x.grad.tolist() == [6, 6, 6]


@pytest.mark.parametrize(
    "use", ["z.chunk(3, 1)[1]", "z.repeat(0, 1)", "F.max_pool1d(z[None], 2)"]
)
def test_hooks_see_gradients_that_cpp_makes_on_the_gpu(use):
    z = torch.rand(4, 6, device=1).requires_grad_()
    middle, seen = z * 1, []
    for tensor in (z, middle):
        tensor.register_hook(lambda gradient: seen.append(str(gradient.device)))
    z.register_post_accumulate_grad_hook(lambda t: seen.append(str(t.grad.device)))
    torch.autograd.grad(eval(use, globals(), {"z": z}).sum(), z)
    eval(use, globals(), {"z": middle}).sum().backward()
    assert seen == ["cuda:1"] * 4


def test_double_backward_crosses_devices():
    z = torch.rand(4, device=1, requires_grad=True)
    (first,) = torch.autograd.grad((z.to(2) ** 3).sum(), z, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), z)
    assert where(first, second) == ["cuda:1"] * 2
    assert torch.allclose(second, 6 * z)
    w = torch.rand(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: (t.to(1) * t.to(2).to(1)).sum(), w)
    assert torch.autograd.gradgradcheck(lambda t: (t.to(1) ** 3).sum().cpu(), w)


def test_copies_in_place_and_scalars_of_the_host_have_gradients_there():
    x, scalar = torch.ones(3, requires_grad=True), torch.ones((), requires_grad=True)
    whole, part = torch.zeros(3, device=1), torch.zeros(3, device=2)
    whole.copy_(x)
    part[:2] = x[:2]
    ((whole * scalar).sum().to(2) + part.sum()).backward()
    assert where(x.grad, scalar.grad) == ["cpu"] * 2
    assert x.grad.tolist() == [2, 2, 1] and scalar.grad.item() == 3


@pytest.mark.parametrize("output, expected", [(0, [1, 1]), (1, [2, 2])])
def test_functions_get_zeros_for_unused_outputs_on_their_devices(output, expected):
    seen = []

    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a * 1, a.to(3) * 2

        @staticmethod
        def backward(ctx, first, second):
            seen.extend(where(first, second))
            return first + 2 * second.to(first.device)

    x = torch.ones(2, device=2, requires_grad=True)
    Two.apply(x)[output].sum().backward()
    assert seen == ["cuda:2", "cuda:3"]
    assert where(x.grad) == ["cuda:2"] and x.grad.tolist() == expected


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(3, 3), nn.Dropout()).to(1)
    x = torch.ones(8, 3, device=1, requires_grad=True)
    state = torch.cuda.get_rng_state(1)
    block(x).sum().backward()
    wanted, x.grad = x.grad, None
    torch.cuda.set_rng_state(state, 1)
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert where(x.grad) == ["cuda:1"] and torch.equal(x.grad, wanted)


def test_saved_tensors_may_wait_on_the_host():
    x = torch.ones(3, device=1, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        y = (x * x).sum()
    assert [e.target for e in simgpu.timeline().copies].count("cpu") == 2
    y.backward()
    assert where(x.grad) == ["cuda:1"] and x.grad.tolist() == [2, 2, 2]


def test_forward_mode_crosses_devices():
    x = torch.ones(2, device=1)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        tangents = [forward_ad.unpack_dual(t).tangent for t in (dual**2, dual.to(2))]
        assert where(*tangents) == ["cuda:1", "cuda:2"]


def test_module_hooks_see_the_device():
    layer, seen = nn.Linear(2, 2).to(1), []
    layer.register_full_backward_hook(lambda _, i, o: seen.extend(where(*i, *o)))
    layer(torch.ones(1, 2, device=1, requires_grad=True)).sum().backward()
    assert seen == ["cuda:1", "cuda:1"]


# -- optimizers ------------------------------------------------------------------------

OPTIMIZERS = {its for its in vars(torch.optim).values() if inspect.isclass(its)
              and issubclass(its, torch.optim.Optimizer)}  # fmt: skip
OPTIMIZERS -= {torch.optim.Optimizer, torch.optim.SparseAdam}
VARIANTS: list[dict] = [
    {}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"capturable": True},
    {"capturable": True, "foreach": True},
]  # fmt: skip
CASES = [
    pytest.param(kind, variant, id=f"{kind.__name__} {' '.join(variant)}")
    for kind in sorted(OPTIMIZERS, key=lambda kind: kind.__name__)
    for variant in VARIANTS
    if set(variant) <= set(inspect.signature(kind).parameters)
]


def train(kind, devices: list[str], **options):
    """The weights after three steps of two layers, each on its device."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Linear(8, 2)]
    x, y = torch.randn(16, 4), torch.randn(16, 2)
    for layer, device in zip(layers, devices, strict=True):
        layer.to(device)
    weights = [p for layer in layers for p in layer.parameters() if p.dim() == 2]
    optimizer = kind(weights, lr=0.1, **options)

    def loss():
        optimizer.zero_grad()
        hidden = layers[0](x.to(devices[0])).tanh()
        value = F.mse_loss(layers[1](hidden.to(devices[1])), y.to(devices[1]))
        value.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        return value

    for _ in range(3):
        optimizer.step(loss)
    return weights, optimizer


@functools.cache
def trained_on_the_cpu(kind) -> list[torch.Tensor]:
    """The weights that all variants of an optimizer should find."""
    return [weight.detach() for weight in train(kind, ["cpu", "cpu"])[0]]


def skip_if_not_for_cuda(kind, options: dict) -> None:
    """Some versions of PyTorch have a fused optimizer for the CPU alone."""
    if not options.get("fused"):
        return
    weight = torch.ones(2, 2, device="cuda", requires_grad=True)
    weight.grad = torch.ones_like(weight)
    try:
        kind([weight], **options).step()
    except RuntimeError as error:
        if "supported devices" not in str(error):
            raise
        pytest.skip(f"this PyTorch has no fused {kind.__name__} for CUDA")


@pytest.mark.parametrize("kind, options", CASES)
def test_optimizers_train_as_on_the_cpu(kind, options):
    devices = ["cuda:1", "cuda:2"]
    if kind is torch.optim.LBFGS:  # it makes one flat vector of all gradients
        devices = ["cuda:1", "cuda:1"]
    skip_if_not_for_cuda(kind, options)
    found, optimizer = train(kind, devices, **options)
    assert where(*found) == devices
    for a, b in zip(trained_on_the_cpu(kind), found, strict=True):
        torch.testing.assert_close(b.detach().cpu(), a)
    on_gpu = kind is torch.optim.ASGD or options.keys() & {"capturable", "fused"}
    for weight, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                stays = name in ("step", "mu_product") and not on_gpu
                assert str(value.device) == ("cpu" if stays else str(weight.device))
    optimizer.load_state_dict(optimizer.state_dict())


def test_sparse_adam():
    table = nn.Embedding(5, 3, sparse=True).to(1)
    optimizer = torch.optim.SparseAdam(table.parameters())
    before = table.weight.detach().clone()
    table(torch.tensor([1, 2], device=1)).sum().backward()
    assert table.weight.grad.is_sparse and where(table.weight.grad) == ["cuda:1"]
    optimizer.step()
    assert where(optimizer.state[table.weight]["exp_avg"]) == ["cuda:1"]
    changed = (table.weight != before).any(1)
    assert changed.tolist() == [False, True, True, False, False]


def test_vectors_of_parameters_do_not_span_devices():
    layers = [nn.Linear(2, 2).to(i) for i in range(2)]
    assert where(nn.utils.parameters_to_vector(layers[1].parameters())) == ["cuda:1"]
    with pytest.raises(TypeError, match="different devices"):
        nn.utils.parameters_to_vector([p for m in layers for p in m.parameters()])


# -- layers ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers(kind):
    torch.manual_seed(0)
    layer, x = kind(3, 4, 2, bidirectional=True), torch.rand(5, 2, 3)
    wanted = layer(x)[0]
    layer.to(1).flatten_parameters()
    found = layer(x.to(1))[0]
    found.sum().backward()
    torch.testing.assert_close(found.cpu(), wanted)
    assert set(where(found, *(p.grad for p in layer.parameters()))) == {"cuda:1"}


def test_packed_sequences():
    pack = nn.utils.rnn.pack_padded_sequence
    x = torch.rand(2, 3, 4, device=1)
    packed = pack(x, torch.tensor([3, 2]), batch_first=True)
    out, (hidden, _) = nn.LSTM(4, 5, batch_first=True).to(1)(packed)
    padded, lengths = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
    assert where(out.data, hidden, padded) == ["cuda:1"] * 3
    assert where(out.batch_sizes, lengths) == ["cpu"] * 2
    with pytest.raises(RuntimeError, match="CPU int64 tensor, but got 1D cuda:1 Long"):
        pack(x, torch.tensor([3, 2], device=1))


@pytest.mark.parametrize("grad", [torch.enable_grad, torch.inference_mode])
def test_transformers(grad):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, hide = torch.rand(2, 4, 8), torch.zeros(2, 4, dtype=torch.bool)
    hide[0, 3] = True
    with grad():
        wanted = model(x, src_key_padding_mask=hide)
        found = model.to(1)(x.to(1), src_key_padding_mask=hide.to(1))
    assert where(found) == ["cuda:1"]
    torch.testing.assert_close(found.cpu(), wanted)


# -- data, random numbers --------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loaders_pin_for_gpus(workers):
    data = TensorDataset(torch.arange(8.0), torch.arange(8))
    batches = list(DataLoader(data, 4, pin_memory=True, num_workers=workers))
    assert len(batches) == 2
    for x, y in batches:
        assert x.is_pinned() and y.is_pinned() and where(x) == ["cpu"]
        assert where(x.to(1, non_blocking=True)) == ["cuda:1"]
    assert not torch.ones(2).is_pinned()
    assert torch.ones(2).pin_memory().is_pinned()
    assert torch.empty(2, pin_memory=True).is_pinned()


def test_autograd_notices_what_foreach_has_changed():
    x = torch.ones(3, device=1, requires_grad=True)
    y = x.exp()
    with torch.no_grad():
        torch._foreach_mul_([y.detach()], 2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with torch.inference_mode():
        kept = [torch.ones(2, device=1)]
        torch._foreach_add_(kept, 1)
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        torch._foreach_add_(kept, 1)


def test_each_gpu_has_its_own_random_numbers():
    torch.manual_seed(0)
    first, second = torch.rand(3, device=1), torch.rand(3, device=1)
    assert not torch.equal(first, second)
    assert torch.equal(torch.rand(3, device=2).cpu(), first.cpu())  # all are seeded
    state = torch.cuda.get_rng_state(1)
    third = torch.rand(2, device=1)
    torch.cuda.set_rng_state(state, 1)
    assert torch.equal(torch.rand(2, device=1), third)
    with torch.random.fork_rng(devices=[1]):
        forked = torch.rand(2, device=1)
    assert torch.equal(torch.rand(2, device=1), forked)
    torch.cuda.manual_seed_all(5)
    drawn = torch.rand(2, device=3)
    torch.cuda.default_generators[3].manual_seed(5)
    assert torch.equal(torch.rand(2, device=3), drawn)
    assert torch.cuda.initial_seed() == 5
    assert len(torch.cuda.get_rng_state_all()) == 4


def test_random_work_on_a_gpu_does_not_disturb_the_host():
    before = torch.get_rng_state()
    x = torch.ones(8, device=1)
    nn.init.normal_(torch.empty(3, device=1))
    F.dropout(x)
    F.rrelu(x, training=True)
    F.gumbel_softmax(x)
    torch.randn_like(x).uniform_().bernoulli_()
    torch.poisson(x) + torch.multinomial(x, 8) + torch.randperm(8, device=1)
    torch.distributions.Normal(x, 1.0).sample()
    nn.Transformer(8, 2, 1, 1, 16, device="cuda:1")(x.view(1, 1, 8), x.view(1, 1, 8))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    dropped = F.dropout(x)
    torch.manual_seed(1)
    torch.rand(100)  # nor does the host disturb the GPU
    assert torch.equal(F.dropout(x), dropped)


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_random_numbers_are_drawn_one_thread_at_a_time(device):
    """For a GPU draws from the host's generator, with a state of its own."""
    draw = functools.partial(torch.rand, 1, device=device)
    thread = threading.Thread(target=draw)
    with runtime.current().random_lock:
        thread.start()
        thread.join(0.2)  # the limit is what is tested
        assert thread.is_alive()  # it waits for us
    thread.join(SHORT)
    assert not thread.is_alive()


def test_generators_of_gpus():
    generator = torch.Generator(device="cuda:1").manual_seed(3)
    assert isinstance(generator, torch.Generator) and where(generator) == ["cuda:1"]
    twin = generator.clone_state()
    drawn = torch.rand(2, device=1, generator=generator)
    assert torch.equal(torch.rand(2, device=1, generator=twin), drawn)
    assert where(twin, drawn) == ["cuda:1"] * 2
    for draw in (
        lambda g: torch.randperm(4, device=1, generator=g),
        lambda g: torch.empty(3, device=1).normal_(generator=g),
        lambda g: torch.multinomial(torch.ones(3, device=1), 2, generator=g),
    ):
        assert where(draw(generator)) == ["cuda:1"]
