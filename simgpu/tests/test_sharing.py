"""GPU tensors that several processes use: `torch.multiprocessing`, CUDA's handles."""

import pickle

import pytest
import torch
import torch.multiprocessing as mp
from torch import cuda, nn
from torch.multiprocessing.reductions import reduce_tensor

import simgpu
from simgpu import NotSimulated
from simgpu import _runtime as runtime
from support import programs
from support.limits import SHORT

# -- what travels ----------------------------------------------------------------------
# The child is forked before CUDA is initialised, and so may use it.

HEAD = """
import sys, torch
import torch.multiprocessing as mp
from torch import cuda, nn

def told(connection):
    assert connection.poll(SHORT), "the other process says nothing"
    return connection.recv()

def in_child(target):
    context = mp.get_context("fork")
    (ours, theirs), (out, into) = context.Pipe(), context.Pipe(duplex=False)
    process = context.Process(target=target, args=(theirs, into), daemon=True)
    process.start()
    theirs.close(), into.close()
    return process, ours, out
"""
TRAVELS = """
def child(get, put):
    x = told(get)
    assert x.device == torch.device("cuda", 1) and x.tolist() == [0, 1, 2, 3]
    assert cuda.memory_allocated(1) == 0 and cuda.memory_reserved(1) == 0
    assert x.is_shared() and isinstance(x.data_ptr(), int)
    x += 1
    put.send("added")
    part, same, by_columns, parameter, empty, module, sparse = told(get)
    assert part.tolist() == [3, 4] and same.untyped_storage()._cdata == (
        part.untyped_storage()._cdata) == x.untyped_storage()._cdata
    assert part.storage_offset() == 2
    assert by_columns.stride() == (1, 2) and by_columns.tolist() == [[0, 2], [1, 3]]
    assert type(parameter) is nn.Parameter and not parameter.requires_grad
    assert empty.shape == (0, 3) and str(empty.device) == "cuda:1"
    assert module.weight.is_leaf and module.weight.requires_grad
    assert str(module.weight.device) == "cuda:0"
    assert sparse.to_dense().tolist() == [[1, 0], [0, 1]] and sparse.is_cuda
    for resize in (lambda: x.resize_(100), lambda: x.untyped_storage().resize_(0)):
        try:
            resize()
        except RuntimeError as error:
            assert "storage that is not resizable" in str(error)
        else:
            raise AssertionError("it can be resized")
    event = told(get)
    assert type(event) is cuda.Event and event.device == torch.device("cuda", 1)
    assert event.query()
    event.wait(), event.synchronize()
    put.send(torch.full((2,), 7, device="cuda:0"))
    told(get)


process, to_child, from_child = in_child(child)
x = torch.arange(4, device="cuda:1")
to_child.send(x)
assert told(from_child) == "added" and x.tolist() == [1, 2, 3, 4]
by_columns = torch.arange(4, device="cuda").view(2, 2).t()
parameter = nn.Parameter(torch.ones(2, device="cuda"), requires_grad=False)
empty = torch.empty(0, 3, device="cuda:1")
sparse = torch.eye(2, device=1).to_sparse()
to_child.send((x[2:], x, by_columns, parameter, empty, nn.Linear(2, 2).cuda(), sparse))
event = cuda.Event(interprocess=True)
event.record(cuda.current_stream(1))
to_child.send(event)
got = told(from_child)
assert got.tolist() == [7, 7] and str(got.device) == "cuda:0"
try:
    to_child.send(got)
except RuntimeError as error:
    assert "tensor received from another process" in str(error)
del got  # else its owner would warn at its end
to_child.send("end")
process.join(SHORT)
print("ended with", process.exitcode)
"""


def run(tmp_path, text: str, head: str = HEAD, **environment: str) -> programs.Done:
    script = tmp_path / "shares.py"
    script.write_text((head + text).replace("SHORT", str(SHORT)), encoding="utf-8")
    return programs.simulated(tmp_path, "--gpus", 2, script, **environment)


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_tensors_travel_with_all_that_they_are_and_their_memory_is_one(
    tmp_path, settings
):
    done = run(tmp_path, TRAVELS, PYTORCH_ALLOC_CONF=settings)
    assert (done.status, done.stdout) == (0, "ended with 0\n"), done.stderr
    assert "Producer process" not in done.stderr


MEMORY = """
def child(get, put):
    held = [told(get), told(get), told(get)]
    del held[1]  # the same storage as the first
    put.send("has it")
    told(get)
    held.clear()
    put.send("let go")
    kept = told(get)
    put.send("has it")
    told(get)
    kept += 1  # its owner has ended
    sys.stdout.write(f"still {kept.tolist()}")


process, to_child, from_child = in_child(child)
MB = 2**20
x, y = torch.ones(4 * MB, device=0), torch.ones(MB, device=1)
for tensor in (x, x[1:], y):
    to_child.send(tensor)
told(from_child)
assert cuda.memory_allocated(0) == 16 * MB
del x, tensor
cuda.ipc_collect()
assert cuda.memory_allocated(0) == 16 * MB  # the child holds it
to_child.send("let go")
told(from_child)
assert cuda.memory_allocated(0) == 16 * MB  # nobody has looked
cuda.ipc_collect()
assert cuda.memory_allocated(0) == 0 and cuda.memory_allocated(1) == 4 * MB
assert cuda.memory_reserved(0) == 16 * MB
again = torch.ones(4 * MB, device=0)
assert cuda.memory_reserved(0) == 16 * MB  # in the same place
del y
assert cuda.memory_allocated(1) == 0
to_child.send(torch.zeros(2, device=1))
told(from_child)
to_child.send("go on")
"""


def test_a_block_is_its_owners_until_the_last_receiver_lets_go(tmp_path):
    """And a receiver that lives longer keeps its values; PyTorch warns."""
    done = run(tmp_path, MEMORY, HEAD.replace("daemon=True", "daemon=False"))
    assert (done.status, done.stdout) == (0, "still [1.0, 1.0]"), done.stderr


def test_memory_is_asked_back_before_a_new_segment_is_made(tmp_path):
    text = """
def child(get, put):
    x = told(get)
    del x
    put.send("let go")

process, to_child, from_child = in_child(child)
to_child.send(torch.ones(2**22, device=0))
told(from_child)
assert cuda.memory_allocated(0) == 2**24  # nobody has looked
x = torch.ones(2**22, device=0)
assert cuda.memory_allocated(0) == cuda.memory_reserved(0) == 2**24
process.join(SHORT)
print("ended with", process.exitcode)
"""
    done = run(tmp_path, text)
    assert (done.status, done.stdout) == (0, "ended with 0\n"), done.stderr


def test_an_owner_that_ends_before_its_receivers_warns(tmp_path):
    text = """
def child(get, put):
    x = told(get)
    put.send("has it")
    get.poll(SHORT)  # until the parent has ended
    print(x.tolist(), flush=True)

process, to_child, from_child = in_child(child)
to_child.send(torch.ones(2, device=0))
told(from_child)
import multiprocessing.process
multiprocessing.process._children.discard(process)  # who does not wait for it
to_child.close()
"""
    done = run(tmp_path, text)
    assert done.status == 0
    warning = "Producer process has been terminated before all shared CUDA tensors rel"
    assert done.stderr.count(warning) == 1, done.stderr


# -- workers and results ---------------------------------------------------------------

WORKERS = """
import warnings
from torch.utils.data import DataLoader, TensorDataset

LIMIT = dict(num_workers=1, timeout=SHORT, multiprocessing_context="fork")


class Doubled:
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return torch.ones(2, device="cuda") * i


def result(queue, i):
    queue.put((i, torch.full((2,), i).tolist(), torch.full((2,), i, device="cuda")))
    for number in range(1000):  # more than a pipe holds
        queue.put((number, "x" * 1000))


context = mp.get_context("fork")
queues = [context.Queue() for _ in range(2)]
children = [
    context.Process(target=result, args=(queue, i), daemon=True)
    for i, queue in enumerate(queues)
]
for child in children:
    child.start()
for i, queue in enumerate(queues):  # the child lives until it has been read out
    number, values, tensor = queue.get(timeout=SHORT)
    assert (number, values, tensor.tolist()) == (i, [i, i], [i, i]) and tensor.is_cuda
    del tensor
    assert [queue.get(timeout=SHORT)[0] for _ in range(1000)] == list(range(1000))
for child in children:
    child.join(SHORT)
assert [child.exitcode for child in children] == [0, 0]

numbers = torch.arange(4.0).view(2, 2)
warnings.simplefilter("ignore", UserWarning)  # of pin_memory_device: deprecated
for device in ("", "cuda:1"):
    loader = DataLoader(numbers, pin_memory=True, pin_memory_device=device, **LIMIT)
    assert [batch.is_pinned() for batch in loader] == [True, True]
for wrong in (Doubled(), TensorDataset(numbers.cuda())):
    try:
        list(DataLoader(wrong, **LIMIT))
    except RuntimeError as error:
        assert "Cannot re-initialize CUDA in forked subprocess" in str(error), error
    else:
        raise AssertionError("a forked worker has used CUDA")
print("all as it should be")
"""


@pytest.mark.slow
def test_results_through_queues_and_what_workers_of_a_loader_may_do(tmp_path):
    done = run(tmp_path, WORKERS)
    assert (done.status, done.stdout) == (0, "all as it should be\n"), done.stderr


# -- hogwild ---------------------------------------------------------------------------

HOGWILD = """
import torch
import torch.multiprocessing as mp
from torch import nn


def train(rank, model, queue):
    data = torch.ones(1, 3, device=model.weight.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(data).sum().backward()
    optimizer.step()
    queue.put((str(model.weight.device), model.bias.grad.item()))


if __name__ == "__main__":
    model = nn.Linear(3, 1).to("cuda:1")
    model.share_memory()
    before = model.bias.item()
    methods = sorted({"spawn", "forkserver"} & set(mp.get_all_start_methods()))
    for method in methods:
        queue = mp.get_context(method).Queue()
        mp.start_processes(train, (model, queue), nprocs=1, start_method=method)
        print(queue.get(timeout=SHORT))  # the process has ended
    print(round(model.bias.item() - before, 3) == -0.5 * len(methods))
"""


@pytest.mark.slow
def test_processes_train_one_model_on_a_gpu(tmp_path):
    done = run(tmp_path, HOGWILD, head="")
    told = "('cuda:1', 1.0)\n" * (len(mp.get_all_start_methods()) - 1)
    assert (done.status, done.stdout) == (0, told + "True\n"), done.stderr
    assert "Producer process" not in done.stderr


# -- rules -----------------------------------------------------------------------------


@pytest.fixture
def gpus():
    simgpu.start(2)
    runtime.current().for_children = {"number": 2}  # as under `python -m simgpu`
    yield
    simgpu.stop()


def where(tensor: torch.Tensor) -> int:
    """The address on the host."""
    return torch._C.StorageBase.data_ptr(tensor.untyped_storage())


def test_what_put_sends_is_moved_before_the_program_goes_on(gpus):
    """A thread of the queue pickles; a write meanwhile must not be lost."""
    context = mp.get_context("spawn")
    x, model = torch.ones(2, device=1), nn.Linear(2, 2, device=1)
    addresses = where(x), where(model.weight)
    queue = context.Queue()
    queue.put({"x": [x], "model": model})
    moved = where(x), where(model.weight)
    assert all(a != b for a, b in zip(addresses, moved, strict=True))
    queue.close()
    queue.join_thread()
    assert (where(x), where(model.weight)) == moved and x.tolist() == [1, 1]


def test_nothing_is_sent_to_processes_that_will_have_no_gpus(gpus):
    runtime.current().for_children = None
    with pytest.raises(NotImplementedError, match="only under python -m simgpu"):
        reduce_tensor(torch.ones(2, device=1))


def test_what_cuda_refuses(gpus):
    x = torch.ones(2, device=1, requires_grad=True)
    with pytest.raises(RuntimeError, match="refusing to serialize non-leaf tensor"):
        reduce_tensor(x * 2)
    rebuild, arguments = reduce_tensor(x)
    assert isinstance(arguments[6], int)  # programs write another GPU's number there
    assert pickle.loads(pickle.dumps(arguments[7])) == arguments[7]
    with pytest.raises(torch.AcceleratorError, match="invalid device context"):
        rebuild(*arguments)  # in the process that has sent it
    other = (*arguments[:6], 5, *arguments[7:])
    with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
        rebuild(*other)
    with pytest.raises(RuntimeError, match="Cannot pickle CUDA storage"):
        mp.reductions.reduce_storage(x.untyped_storage())
    with pytest.raises(NotSimulated, match="resizing a GPU tensor that was sent"):
        x.detach().resize_(100)
    with pytest.raises(NotSimulated, match="resizing a GPU tensor that was sent"):
        x.untyped_storage().resize_(0)


def test_events_between_processes_keep_no_time(gpus):
    with pytest.raises(torch.AcceleratorError, match="invalid argument"):
        cuda.Event(enable_timing=True, interprocess=True)
    with pytest.raises(torch.AcceleratorError, match="invalid resource handle"):
        cuda.Event().ipc_handle()
    handle = cuda.Event(interprocess=True).ipc_handle()
    assert len(handle) == 64
    with pytest.raises(torch.AcceleratorError, match="invalid device context"):
        cuda.Event.from_ipc_handle(0, handle)
    with pytest.raises(TypeError, match="byte-like object of size 64"):
        cuda.Event.from_ipc_handle(0, b"")
    other = b"1 1".ljust(64)
    event = cuda.Event.from_ipc_handle(torch.device("cuda", 1), other)
    assert event.query() and event.device == torch.device("cuda", 1)
