"""Memory beside results: cuBLAS's workspaces, and what kernels take and give back."""

import threading

import pytest
import torch

import simgpu
from simgpu._compat import is_torch
from simgpu._device.cards import CARDS, MIB
from simgpu._device.workspaces import WORKSPACE, WORKSPACE_OF_HOPPER
from simgpu._dispatch.working_memory import sum_buffers


@pytest.fixture
def gpu():
    """Starts a GPU; what it has allocated is counted from there on."""

    def start(**options) -> torch.Tensor:
        simgpu.start(1, **options)
        return torch.ones(16, 16, device="cuda", requires_grad=True)

    yield start
    simgpu.stop()


def workspaces(tensors: int = 1) -> int:
    """Bytes beside so many tensors of the fixture's size."""
    return torch.cuda.memory_allocated() - tensors * 16 * 16 * 4


def test_forward_and_backward_have_a_workspace_each(gpu):
    x = gpu()
    out = (x @ x).sum()
    assert workspaces() - 512 == WORKSPACE == 8519680
    out.backward()
    assert workspaces(2) - 512 == 2 * WORKSPACE
    with torch.no_grad():
        x @ x
        torch.addmm(x, x, x), torch.bmm(x[None], x[None]), x.mv(x[0]), x[0].dot(x[0])
    assert workspaces(2) - 512 == 2 * WORKSPACE


@pytest.mark.parametrize(
    "options, nbytes",
    [
        ({"card": "H200"}, WORKSPACE_OF_HOPPER), ({"card": "L40S"}, WORKSPACE),
        ({"card": "B200"}, WORKSPACE_OF_HOPPER if is_torch((2, 12)) else WORKSPACE),
        ({"memory": "512MB"}, 0),  # of a card that is made smaller nothing is lost
        ({"memory": "512MB", "overhead": True}, WORKSPACE), ({"overhead": False}, 0),
    ],
    ids=str,
)  # fmt: skip
def test_the_card_and_the_program_decide_on_their_size(gpu, options, nbytes):
    x = gpu(**options)
    x.detach() @ x.detach()
    assert workspaces() == nbytes and WORKSPACE_OF_HOPPER == 32 * MIB
    (x @ x).sum().backward()
    assert workspaces(2) == 2 * nbytes


def test_what_cublas_does_not_compute_takes_none(gpu):
    gpu()
    image = torch.ones(1, 3, 8, 8, device="cuda")
    layer = torch.nn.Conv2d(3, 4, 3).cuda()
    layer(image).sum().backward()
    assert torch.cuda.max_memory_allocated() < MIB
    empty = torch.ones(0, 4, device="cuda")
    empty @ empty.T
    assert torch.cuda.max_memory_allocated() < MIB


def test_each_stream_has_its_own(gpu):
    x = gpu().detach()
    x @ x
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        x @ x, x @ x
    assert workspaces() == 2 * WORKSPACE


def test_a_thread_leaves_its_handle_to_the_next(gpu):
    x = gpu().detach()
    x @ x
    for _ in range(3):
        thread = threading.Thread(target=lambda: x @ x)
        thread.start()
        thread.join()
        assert workspaces() == 2 * WORKSPACE


def test_what_is_computed_again_in_backward_is_autograds(gpu):
    x = gpu()
    y = torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)
    y.sum().backward()
    assert workspaces(2) < WORKSPACE
    y = torch.utils.checkpoint.checkpoint(lambda x: x @ x, x, use_reentrant=False)
    assert workspaces(3) == WORKSPACE
    y.sum().backward()
    assert workspaces(3) == 2 * WORKSPACE


def test_workspaces_are_cleared_and_come_again(gpu):
    x = gpu().detach()
    x @ x
    torch._C._cuda_clearCublasWorkspaces()
    assert workspaces() == 0
    x @ x
    assert workspaces() == WORKSPACE


def test_the_environment_and_the_program_set_their_size(gpu, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8:4096:1")
    x = gpu().detach()
    x @ x
    assert workspaces() == (16 * 8 + 4096) * 1024
    assert torch._C._cuda_getCublasWorkspaceSize() == workspaces()
    torch._C._cuda_setCublasWorkspaceSize(6 * MIB)
    assert workspaces() < 6 * MIB
    x @ x
    assert workspaces() == 6 * MIB
    torch._C._cuda_setCublasWorkspaceSize(2 * MIB)
    x @ x
    assert workspaces() == 6 * MIB


def test_a_workspace_may_be_none_or_badly_written(gpu, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    x = gpu().detach()
    x @ x
    assert workspaces() == 0
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "4096")
    torch._C._cuda_clearCublasWorkspaces()
    with pytest.warns(UserWarning, match="Could not parse CUBLAS_WORKSPACE_CONFIG"):
        x @ x
    assert workspaces() == WORKSPACE


def test_a_product_fails_where_its_workspace_does_not_fit(gpu):
    x = gpu().detach()
    torch.cuda.set_per_process_memory_fraction(6 * MIB / CARDS["A100"].total_memory)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 20.00 MiB"):
        x @ x
    torch.cuda.set_per_process_memory_fraction(1.0)
    x @ x
    assert workspaces() == WORKSPACE


def test_sums_of_many_rows_take_what_was_recorded():
    recorded = [16777216, 32]  # in alloc_training.json, after a block of 4096
    assert sum_buffers(CARDS["A100"], 2048, 1024, True, 4) == recorded


@pytest.mark.parametrize(
    "each, sums, rows, buffers",
    [
        (512, 1024, True, []),  # as many rows as one block of threads adds up
        (10000, 512, False, []),  # each number has a block of threads of its own
        (2**21, 1, False, [1024, 4]),
        (1000, 1, False, []),
    ],
)
def test_sums_share_a_number_only_where_that_pays(each, sums, rows, buffers):
    assert sum_buffers(CARDS["A100"], each, sums, rows, 4) == buffers


def test_a_sum_gives_its_buffers_back(gpu):
    gpu()
    x = torch.ones(2048, 1024, device="cuda")
    count = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = x.sum(0)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == count + 3
    assert torch.cuda.memory_allocated() == before + 4096
    assert torch.cuda.max_memory_allocated() == before + 4096 + 16777216 + 512
    for z in (x[:, :100], x.T, x.to_sparse(), x[0], x[:0]):
        z.sum(0)
    assert torch.equal(y.cpu(), torch.full((1024,), 2048.0))
