"""Whole programs on simulated GPUs: the CPU's values, in the right place."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from helpers import simgpu

GPU = torch.device("cuda:1")


@pytest.fixture(autouse=True)
def gpus():
    simgpu.start(4)
    yield
    simgpu.stop()


def devices(tensors) -> set[str]:
    return {str(tensor.device) for tensor in tensors}


def seeded(make):
    """A module with the same weights every time."""
    torch.manual_seed(0)
    return make()


def agree(result, reference):
    """The same values, on GPU 1 and on the CPU."""
    assert devices([result]) == {"cuda:1"} and devices([reference]) == {"cpu"}
    torch.testing.assert_close(result.cpu(), reference, rtol=0, atol=0)


# -- optimizers ----------------------------------------------------------------------

DENSE = ["ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax",
         "Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]  # fmt: skip
OPTIONS = [(name, {}) for name in DENSE] + [
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("Adam", {"foreach": False}),
    ("AdamW", {"foreach": True}),
    ("SGD", {"fused": True}),
    ("Adam", {"fused": True}),
]


def train(optimizer_name, options, device):
    bias = optimizer_name != "Muon"  # Muon takes matrices only
    model = seeded(
        lambda: nn.Sequential(
            nn.Linear(6, 5, bias=bias), nn.Tanh(), nn.Linear(5, 1, bias=bias)
        )
    ).to(device)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).to(device)
    optimizer = getattr(torch.optim, optimizer_name)(
        model.parameters(), lr=0.01, **options
    )
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("name, options", OPTIONS)
def test_optimizers_train_alike(name, options):
    if not hasattr(torch.optim, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    # CUDA takes the foreach path by itself: compare like with like
    like = dict(options)
    if not {"foreach", "fused"} & set(options) and name not in ("Adafactor", "Muon"):
        like["foreach"] = True
    serial, _ = train(name, like, "cpu")
    model, optimizer = train(name, options, GPU)
    for a, b in zip(model.parameters(), serial.parameters(), strict=True):
        assert a.device == GPU and a.grad.device == GPU
        torch.testing.assert_close(a.cpu(), b, rtol=1e-6, atol=1e-7)
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                assert value.device == GPU, key


def test_lbfgs_and_sparse_adam():
    def minimise(device):
        x = torch.ones(3, device=device, requires_grad=True)
        optimizer = torch.optim.LBFGS([x])

        def closure():
            optimizer.zero_grad()
            loss = ((x - 3) ** 2).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        return x.detach()

    agree(minimise(GPU), minimise("cpu"))

    def embed(device):
        table = seeded(lambda: nn.Embedding(9, 4, sparse=True)).to(device)
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        table(torch.tensor([1, 4, 4], device=device)).sum().backward()
        assert table.weight.grad.is_sparse
        assert table.weight.grad.device == torch.device(device)
        optimizer.step()
        return table.weight.detach()

    agree(embed(GPU), embed("cpu"))


def test_one_optimizer_for_a_model_on_two_gpus():
    def run(first, second):
        a, b = seeded(lambda: (nn.Linear(4, 4), nn.Linear(4, 1)))
        a, b = a.to(first), b.to(second)
        optimizer = torch.optim.AdamW([*a.parameters(), *b.parameters()], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            b(a(torch.ones(2, 4, device=first)).to(second)).sum().backward()
            nn.utils.clip_grad_norm_([*a.parameters(), *b.parameters()], 1.0)
            optimizer.step()
        return [*a.parameters(), *b.parameters()]

    split, serial = run("cuda:0", "cuda:3"), run("cpu", "cpu")
    assert [str(p.device) for p in split] == ["cuda:0"] * 2 + ["cuda:3"] * 2
    for a, b in zip(split, serial, strict=True):
        assert a.grad.device == a.device
        torch.testing.assert_close(a.cpu(), b)


# -- autograd ------------------------------------------------------------------------


def test_gradients_return_to_where_their_tensors_live():
    a = torch.ones(3, requires_grad=True)
    b = torch.full((3,), 2.0, device="cuda:0", requires_grad=True)
    loss = (a.to("cuda:2") * b.to("cuda:2")).sum().to("cuda:3")
    loss.backward()
    assert str(a.grad.device) == "cpu" and a.grad.tolist() == [2, 2, 2]
    assert str(b.grad.device) == "cuda:0" and b.grad.tolist() == [1, 1, 1]


def test_a_host_scalar_keeps_its_gradient_on_the_host():
    s = torch.tensor(3.0, requires_grad=True)
    w = torch.ones(2, requires_grad=True)
    x = torch.ones(4, device=GPU)
    (s * x + w.sum() * x).sum().backward()
    assert s.grad.device == w.grad.device == torch.device("cpu")
    assert s.grad.item() == 4 and w.grad.tolist() == [4, 4]


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.chunk(2)[0],
        lambda x: x.split([1, 3])[1],
        lambda x: x.unbind(0)[2],
        lambda x: x[1:3],
        lambda x: x[:, 1],
        lambda x: x.topk(2).values,
        lambda x: x.sort(dim=1).values,
        lambda x: x.cumsum(0),
        lambda x: x.max(dim=0).values,
        lambda x: x.repeat_interleave(2, dim=0),
        lambda x: x.pow(2).mean(1),
        lambda x: torch.linalg.svdvals(x),
        lambda x: F.softmax(x, 1),
        lambda x: F.pad(x, (1, 1)),
        lambda x: torch.cat([x, x.to(torch.float64)]),
        lambda x: x.to(torch.float64).to(torch.float32),
        lambda x: torch.einsum("ij,kj->ik", x, x),
        lambda x: torch.stack([x, x]).std(0),
        lambda x: x.index_select(0, torch.tensor([0, 2], device=x.device)),
        lambda x: x.masked_fill(x > 0, 1.0),
        lambda x: torch.where(x > 0, x, 2 * x),
        lambda x: x.expand(2, 4, 4).norm(),
        lambda x: checkpoint(lambda y: y.tanh().chunk(2)[1], x, use_reentrant=False),
    ],
)
def test_backward_stays_on_the_gpu(use):
    def gradient(device):
        values = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
        x = values.to(device).requires_grad_()
        out = use(x)
        assert out.device == torch.device(device)
        out.sum().backward()
        return x.grad

    agree(gradient(GPU), gradient("cpu"))


def test_double_backward_across_devices():
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    y = (x.to(GPU) ** 3).sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    first.sum().backward()
    assert first.device.type == "cpu" and x.grad.tolist() == [12, 18]


def test_a_custom_function_gets_its_missing_gradient_on_the_gpu():
    seen = []

    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2, x * 3

        @staticmethod
        def backward(ctx, a, b):
            seen.extend([str(a.device), str(b.device)])
            return 2 * a + 3 * b

    x = torch.ones(2, device=GPU, requires_grad=True)
    Two.apply(x)[0].sum().backward()
    assert seen == ["cuda:1", "cuda:1"]
    assert x.grad.device == GPU and x.grad.tolist() == [2, 2]


def test_a_gradient_of_another_device_is_refused():
    x = torch.ones(2, device=GPU, requires_grad=True)
    with pytest.raises(RuntimeError, match="device"):
        x.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="expected device cuda:1 but got cpu"):
        (x * 2).backward(torch.ones(2))


# -- modules -------------------------------------------------------------------------

MODULES = [
    ("linear", lambda: nn.Linear(4, 3), lambda: torch.randn(2, 4)),
    ("conv", lambda: nn.Conv2d(2, 3, 3), lambda: torch.randn(1, 2, 6, 6)),
    ("transposed", lambda: nn.ConvTranspose1d(2, 3, 3), lambda: torch.randn(1, 2, 6)),
    ("batch norm", lambda: nn.BatchNorm1d(4), lambda: torch.randn(6, 4)),
    ("layer norm", lambda: nn.LayerNorm(4), lambda: torch.randn(6, 4)),
    ("group norm", lambda: nn.GroupNorm(2, 4), lambda: torch.randn(2, 4, 3)),
    ("rnn", lambda: nn.RNN(4, 5), lambda: torch.randn(3, 2, 4)),
    ("lstm", lambda: nn.LSTM(4, 5, 2), lambda: torch.randn(3, 2, 4)),
    ("gru", lambda: nn.GRU(4, 5, bidirectional=True), lambda: torch.randn(3, 2, 4)),
    ("lstm cell", lambda: nn.LSTMCell(4, 5), lambda: torch.randn(2, 4)),
    ("embedding", lambda: nn.Embedding(7, 3), lambda: torch.tensor([1, 5, 5])),
    ("bag", lambda: nn.EmbeddingBag(7, 3), lambda: torch.tensor([[1, 5], [2, 2]])),
    (
        "transformer",
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0),
        lambda: torch.randn(3, 2, 8),
    ),
    ("pool", lambda: nn.AdaptiveAvgPool2d(2), lambda: torch.randn(1, 2, 5, 5)),
    ("upsample", lambda: nn.Upsample(scale_factor=2), lambda: torch.randn(1, 2, 3, 3)),
]


@pytest.mark.parametrize("name, make, data", MODULES, ids=[m[0] for m in MODULES])
def test_modules_give_the_same_on_a_gpu(name, make, data):
    x = seeded(data)
    serial, model = seeded(make), seeded(make).to(GPU)
    out, there = serial(x), model(x.to(GPU))
    if isinstance(out, tuple):
        out, there = out[0], there[0]
    agree(there.detach(), out.detach())
    if not list(model.parameters()):
        return
    out.square().sum().backward()
    there.square().sum().backward()
    for a, b in zip(model.parameters(), serial.parameters(), strict=True):
        agree(a.grad, b.grad)
    assert devices(model.buffers()) <= {"cuda:1"}


def test_attention_and_packed_sequences():
    x = seeded(lambda: torch.randn(2, 5, 8))
    attention = seeded(lambda: nn.MultiheadAttention(8, 2, batch_first=True))
    reference = attention(x, x, x)[0]
    moved = copy.deepcopy(attention).to(GPU)
    agree(moved(x.to(GPU), x.to(GPU), x.to(GPU))[0].detach(), reference.detach())
    q = x.to(GPU)
    agree(
        F.scaled_dot_product_attention(q, q, q, is_causal=True),
        F.scaled_dot_product_attention(x, x, x, is_causal=True),
    )
    lstm = seeded(lambda: nn.LSTM(8, 3, batch_first=True))
    lengths = torch.tensor([5, 2])
    packed = pack_padded_sequence(x.to(GPU), lengths, batch_first=True)
    assert packed.data.device == GPU and packed.batch_sizes.device.type == "cpu"
    there, sizes = pad_packed_sequence(lstm.to(GPU)(packed)[0], batch_first=True)
    assert there.device == GPU and sizes.tolist() == [5, 2]
    with pytest.raises(RuntimeError, match="1D CPU int64 tensor"):
        pack_padded_sequence(x.to(GPU), lengths.to(GPU), batch_first=True)


# -- saving --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "map_location, where",
    [
        (None, "cuda:1"),
        ("cpu", "cpu"),
        ("cuda:3", "cuda:3"),
        (torch.device("cuda:2"), "cuda:2"),
        ({"cuda:1": "cuda:0"}, "cuda:0"),
        (lambda storage, location: storage.cuda(3), "cuda:3"),
        (lambda storage, location: storage, "cpu"),
    ],
)
def test_saved_tensors_load_where_they_should(map_location, where):
    file = io.BytesIO()
    torch.save({"w": torch.arange(3.0, device=GPU)}, file)
    file.seek(0)
    loaded = torch.load(file, map_location=map_location)["w"]
    assert str(loaded.device) == where and loaded.tolist() == [0, 1, 2]


def test_a_checkpoint_of_training_resumes_on_another_gpu():
    model, optimizer = train("Adam", {}, GPU)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, map_location="cuda:2")
    again = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).to("cuda:3")
    again.load_state_dict(weights)
    resumed = torch.optim.Adam(again.parameters(), lr=0.01)
    resumed.load_state_dict(state)
    moments = [s["exp_avg"] for s in resumed.state.values()]
    assert devices(again.parameters()) == devices(moments) == {"cuda:3"}
    torch.testing.assert_close(again[0].weight.cpu(), model[0].weight.cpu())


def test_copies_and_pickles_stay_on_their_gpu():
    x = torch.arange(3.0, device=GPU, requires_grad=True)
    for other in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), copy.copy(x)):
        assert other.device == GPU and other.tolist() == [0, 1, 2]
        assert other.requires_grad
    model = copy.deepcopy(nn.BatchNorm1d(3).to(GPU))
    assert devices([*model.parameters(), *model.buffers()]) == {"cuda:1"}


# -- random numbers ------------------------------------------------------------------


def test_each_gpu_has_its_own_random_numbers():
    torch.manual_seed(3)
    host = torch.rand(4)
    torch.manual_seed(3)
    a, b = torch.rand(4, device="cuda:0"), torch.rand(4, device="cuda:1")
    again = torch.rand(4, device="cuda:0")
    assert torch.equal(a.cpu(), b.cpu()) and not torch.equal(a, again)
    assert torch.equal(torch.rand(4), host), "the host's stream was disturbed"
    torch.cuda.manual_seed_all(5)
    c = torch.rand(4, device="cuda:2")
    torch.cuda.manual_seed_all(5)
    assert torch.equal(torch.rand(4, device="cuda:2"), c)


def test_generators_and_states():
    generator = torch.Generator(device=GPU).manual_seed(1)
    assert isinstance(generator, torch.Generator) and generator.device == GPU
    x = torch.randn(3, device=GPU, generator=generator)
    y = torch.randn(3, device=GPU, generator=generator.manual_seed(1))
    assert x.device == GPU and torch.equal(x, y)
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(3, device=GPU, generator=torch.Generator())
    state = torch.cuda.get_rng_state(GPU)
    first = torch.rand(2, device=GPU)
    torch.cuda.set_rng_state(state, GPU)
    assert torch.equal(torch.rand(2, device=GPU), first)
    with torch.random.fork_rng(devices=[1]):
        torch.rand(2, device=GPU)
        torch.manual_seed(99)
    torch.cuda.set_rng_state(state, GPU)
    assert torch.equal(torch.rand(2, device=GPU), first)


def test_dropout_draws_from_its_gpu():
    host = torch.get_rng_state()
    dropped = F.dropout(torch.ones(1000, device=GPU), 0.5)
    assert dropped.device == GPU and 350 < (dropped == 0).sum().item() < 650
    assert torch.equal(torch.get_rng_state(), host)


# -- data ----------------------------------------------------------------------------


def test_a_data_loader_with_workers_and_pinned_memory():
    data = TensorDataset(torch.arange(8.0), torch.arange(8))
    loader = DataLoader(data, batch_size=4, num_workers=2, pin_memory=True)
    total = 0.0
    for x, _ in loader:
        assert x.is_pinned() and x.device.type == "cpu"
        total += x.to(GPU, non_blocking=True).sum().item()
    assert total == 28
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        torch.ones(2, device=GPU).pin_memory()
