"""What counts as changed, and what of inference mode may be changed: as on the CPU."""

import pytest
import torch
import torch.distributed as dist

import simgpu
from simgpu._compat import is_torch
from simgpu._distributed.groups import names_of_nccl

aten = torch.ops.aten
REFUSED = "Inplace update to inference tensor outside InferenceMode"
CHANGES = {  # name -> (shapes of what is changed, how)
    "split_copy": ([(2, 4)] * 2, lambda x, out: torch.split_copy(x, 2, out=out)),
    "of other shapes": ([(3, 4)] * 2, lambda x, out: aten.unsafe_split.Tensor_out(
        x, 2, out=out)),
    "unbind_copy": ([(4,)] * 4, lambda x, out: torch.unbind_copy(x, out=out)),
    "unbind_copy, of other sizes": ([(3,)] * 4, lambda x, out: torch.unbind_copy(
        x, out=out)),
    "split of a view": ([(4, 2)] * 2, lambda x, out: torch.split_with_sizes_copy(
        x[:, 1:], [1, 2], 1, out=[out[0][:, :1], out[1]])),
    "t_copy": ([(4, 4)], lambda x, out: torch.t_copy(x, out=out[0])),
    "topk": ([(4, 2)], lambda x, out: torch.topk(
        x, 2, out=(out[0], x.new_empty(4, 2, dtype=torch.int64)))),
    "foreach": ([(4, 4)] * 2, lambda x, out: torch._foreach_mul_(out, [x, x])),
    "foreach, out": ([(4, 4)] * 2, lambda x, out: aten._foreach_mul.List_out(
        [x, x], [x, x], out=out)),
    "pooling": ([(1, 2, 3)], lambda x, out: aten.avg_pool1d.out(
        x.reshape(1, 2, 8)[..., :6], [2], out=out[0])),
    "composite": ([(4, 4)], lambda x, out: out[0].square_()),
    "composite, out": ([(4, 4)], lambda x, out: torch.outer(x[0], x[1], out=out[0])),
    "random": ([(4, 4)], lambda x, out: torch.randn(4, 4, out=out[0])),
    "linspace": ([(16,)], lambda x, out: torch.linspace(0, 1, 16, out=out[0])),
    "through a view": ([(4, 4)], lambda x, out: out[0].reshape(16).add_(1)),
    "custom": ([(4, 4)], lambda x, out: custom(out[0])),
    "of a library": ([(4, 4)], lambda x, out: torch.ops.simgpu_versions.add(out[0])),
}  # fmt: skip


def add_one(x: torch.Tensor) -> None:
    x.add_(1)


library = torch.library.Library("simgpu_versions", "DEF")
library.define("add(Tensor(a!) x) -> ()")
for key in ("CPU", "CUDA"):
    library.impl("add", add_one, key)


@torch.library.custom_op("simgpu_versions::custom", mutates_args=("x",))
def custom(x: torch.Tensor) -> None:
    add_one(x)


def changed(device: str, shapes, change) -> list:
    """Versions after a change; in which modes it is made, and made of what."""
    found = []
    for made_in in (torch.no_grad, torch.inference_mode):
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with made_in():
                out = [torch.ones(shape, device=device) for shape in shapes]
            try:
                with mode():
                    change(torch.ones(4, 4, device=device), out)
                versions = [t._version for t in out if not t.is_inference()]
            except RuntimeError as error:
                versions = str(error)
            found.append(versions)
    return found


@pytest.fixture
def simulator():
    yield lambda: simgpu.start(1)
    simgpu.stop()


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("shapes, change", CHANGES.values(), ids=CHANGES)
def test_changes_count_as_without_a_gpu(simulator, shapes, change):
    expected = changed("cpu", shapes, change)
    simulator()
    assert changed("cuda", shapes, change) == expected
    assert changed("cpu", shapes, change) == expected
    if change is CHANGES["custom"][1] and not is_torch((2, 13)):
        assert expected[3] == []  # what it calls neither counts nor refuses
    else:
        assert REFUSED in expected[3]
    assert expected[5] == []


def test_autograd_notices_what_a_split_has_changed(simulator):
    simulator()
    x = torch.ones(3, device="cuda", requires_grad=True)
    y = x.exp()
    with torch.no_grad():
        torch.split_copy(torch.zeros(6, device="cuda"), 3, out=[y.detach()] * 2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_split_in_one_kernel_of_cuda_counts_and_refuses_nothing(simulator):
    simulator()
    x = torch.ones(4, 2, device="cuda")
    out = [torch.zeros(2, 2, device="cuda"), torch.zeros(1, 2, device="cuda")]
    torch.split_with_sizes_copy(x, [2, 2], out=out)
    assert [t._version for t in out] == [0, 1]  # one is resized
    with torch.inference_mode():
        out = [torch.zeros(2, 2, device="cuda") for _ in range(2)]
    torch.split_with_sizes_copy(x, [2, 2], out=out)
    assert out[1].tolist() == [[1, 1], [1, 1]]


def versions_after_collectives(backend: str) -> list:
    """Of what is written; and of what a gather into a list refuses."""
    dist.init_process_group(backend)
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    given, found = torch.ones(2, device=device), []
    for write in (
        dist.all_reduce,
        lambda x: dist.broadcast(x, 0),
        lambda x: dist.all_gather_into_tensor(x, given),
        lambda x: dist.reduce_scatter_tensor(x, given.repeat(4)),
        lambda x: dist.all_gather([x[:2], x[2:]], given),
    ):
        outs = [torch.ones(4, device=device)]
        with torch.inference_mode():
            outs.append(torch.ones(4, device=device))
        outs.append(torch.ones(4, device=device, requires_grad=True))
        for out in outs:
            try:
                with torch.no_grad():
                    write(out)
                found.append("-" if out.is_inference() else out._version)
            except RuntimeError as error:
                found.append(str(error)[: len(REFUSED)])
    leaves = [torch.ones(2, device=device, requires_grad=True) for _ in range(2)]
    try:
        dist.all_gather(leaves, given)
    except RuntimeError as error:
        found.append(str(error))
    dist.destroy_process_group()
    return found


ENGINES = sorted(names_of_nccl() & {"nccl-legacy", "nccl2"}) or ["nccl"]


@pytest.mark.parametrize("backend", ENGINES)
def test_of_collectives_a_gather_into_a_list_counts(simulated_ranks, backend):
    """NCCL writes to memory; what the older engine gathers in between is copied."""
    leaf = "a leaf Variable that requires grad is being used in an in-place operation."
    expected = [0, "-", 0] * 5
    if backend != "nccl2":
        expected[12:] = [2, REFUSED, 2, leaf]
    assert simulated_ranks(versions_after_collectives, 2, backend) == [expected] * 2
