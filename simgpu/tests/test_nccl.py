"""What NCCL takes and what it refuses, and its class as PyTorch shows it."""

import json
from datetime import timedelta

import numpy
import pytest
import torch
import torch._C._distributed_c10d as torch_C
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.autograd import DeviceType
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import profile
from torch.testing._internal.distributed.fake_pg import FakeStore

import simgpu
from simgpu import NotSimulated
from simgpu._distributed import exchange
from simgpu._distributed.exchange import Reduction, reduce, reduction_named
from support import programs
from support.limits import SHORT
from support.ports import free_port

CUDA = torch.device("cuda")
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def join(card: str = "T4", backend: str = "nccl", **options) -> None:
    simgpu.start(2, card=card)
    dist.init_process_group(
        backend, store=dist.HashStore(), rank=0, world_size=1, **options
    )


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    simgpu.stop()


@pytest.fixture(autouse=True)
def left():
    yield
    leave()


@pytest.fixture
def group():
    join()
    return dist.group.WORLD


def ones(*shape, dtype=torch.float32) -> torch.Tensor:
    return torch.ones(*shape, device=CUDA).to(dtype)


# -- numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "error", "words"),
    [
        (torch.int16, TypeError, "not supported for NCCL process group: Short"),
        (torch.uint16, TypeError, "not supported for NCCL process group: UInt16"),
        (torch.float8_e4m3fnuz, RuntimeError, "Unsupported Float8 type for NCCL"),
        (torch.float8_e4m3fn, dist.DistBackendError, "begins with sm90 capable"),
    ],
)
def test_numbers_that_nccl_cannot_add(group, dtype, error, words):
    with pytest.raises(error, match=words):
        dist.all_reduce(ones(2, dtype=dtype))


def test_float8_is_moved_by_every_card_and_added_by_new_ones():
    join("H100")
    given = ones(2, dtype=torch.float8_e5m2)
    dist.all_reduce(given)
    assert given.float().tolist() == [1, 1]
    leave()
    join()
    dist.broadcast(ones(2, dtype=torch.float8_e5m2), 0)


def test_what_moves_by_sends_has_a_table_of_its_own(group):
    with pytest.raises(RuntimeError, match="Unconvertible NCCL type Short"):
        dist.all_to_all_single(ones(1, dtype=torch.int16), ones(1, dtype=torch.int16))


@pytest.mark.parametrize("op", [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR])
def test_bits_are_not_reduced(group, op):
    with pytest.raises(ValueError, match=r"Cannot use ReduceOp.B\w+ with NCCL"):
        dist.all_reduce(ones(2, dtype=torch.int32), op)


def test_averages_and_factors_need_numbers(group):
    with pytest.raises(TypeError, match="AVG with boolean inputs"):
        dist.all_reduce(ones(2, dtype=torch.bool), ReduceOp.AVG)
    twice = dist._make_nccl_premul_sum(2.0)
    with pytest.raises(TypeError, match="PreMulSum Data type must be half"):
        dist.all_reduce(ones(2, dtype=torch.int32), twice)
    given = ones(2, dtype=torch.bfloat16)
    dist.all_reduce(given, twice)
    assert given.tolist() == [2, 2]


def test_an_average_does_not_overflow():
    """NCCL multiplies by 1/n before it adds."""
    values = [torch.full((1,), 60000.0, dtype=torch.float16) for _ in range(2)]
    assert reduce(values, Reduction("AVG")).item() == 60000
    for whole, mean in (((7, -2), 2), ((-7, 2), -2)):  # towards zero, as C divides
        values = [torch.tensor([value]) for value in whole]
        assert reduce(values, Reduction("AVG")).item() == mean


def test_messages_are_as_large_as_nccl_tests_counts_them():
    """Of what is gathered or scattered, all of it; see `collective_cost.choose`."""
    part, whole, how = (
        torch.ones(2),
        [torch.ones(2) for _ in range(4)],
        Reduction("SUM"),
    )
    of_a_part = [
        exchange.all_reduce(4, 0, [part], how),
        exchange.reduce_to(4, 1, [part], 0, how),
        exchange.broadcast(4, 1, [part], 0),
        exchange.send(part),
        exchange.receive(part),
    ]
    of_all = [
        exchange.all_gather(4, 0, [[its] for its in whole], [part]),
        exchange.reduce_scatter(4, 0, part, whole, how),
        exchange.all_to_all(4, 0, whole, whole),
        exchange.gather(4, 0, whole, part, 0),
        exchange.scatter(4, 0, part, whole, 0),
    ]
    assert {its.name: its.nbytes for its in of_a_part if its.nbytes != 8} == {}
    assert {its.name: its.nbytes for its in of_all if its.nbytes != 32} == {}
    assert exchange.barrier(4).nbytes == 0
    uneven = [torch.ones(1), torch.ones(3)]  # all that is scattered, on each rank
    assert exchange.reduce_scatter(2, 0, torch.ones(1), uneven, how).nbytes == 16


def test_a_sum_of_booleans_is_or_and_their_product_and():
    for name, found in (("SUM", [True, False]), ("PRODUCT", [False, False])):
        values = [torch.tensor([True, False]), torch.tensor([False, False])]
        how = reduction_named(name, torch.bool)
        assert reduce(values, how).tolist() == found


# -- shapes ----------------------------------------------------------------------------


def test_rows_or_channels_last_and_nothing_else(group):
    dist.all_reduce(ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
    dist.all_reduce(ones(4, 4)[:1].T)
    for tensor in (ones(2, 3).T, ones(4)[::2], ones(1).expand(4)):
        with pytest.raises(ValueError, match="Tensors must be contiguous"):
            dist.all_reduce(tensor)


def test_lists_of_a_gather_may_have_gaps(group):
    out = torch.zeros(2, 4, device=CUDA)
    dist.all_gather([out[:, ::2]], torch.arange(4.0, device=CUDA).view(2, 2))
    assert out.tolist() == [[0, 0, 1, 0], [2, 0, 3, 0]]
    dist.reduce_scatter(part := ones(2, 2), [out[:, ::2]])
    assert part.tolist() == [[0, 1], [2, 3]]


def test_sizes_and_kinds_must_fit(group):
    two, three, half = ones(2), ones(3), ones(2, dtype=torch.half)
    gather, reduce = dist.all_gather_into_tensor, dist.reduce_scatter_tensor
    swap = dist.all_to_all_single
    for call, arguments, error, words in [
        (gather, (two, half), TypeError, "must have the same type as input tensor"),
        (gather, (three, two), ValueError, "world_size times input tensor size"),
        (reduce, (two, half), TypeError, "the same type as the output tensor"),
        (reduce, (two, three), ValueError, "output size times world size"),
        (swap, (two, two, [2], [1]), RuntimeError, "sizes doesn't match total dim 0"),
        (swap, (two, two, [1, 1], [1, 1]), RuntimeError, "splits not equal to group s"),
        (dist.gather, (two, [two, two]), ValueError, "Incorrect output list size 2"),
        (dist.scatter, (two, [three]), ValueError, "invalid tensor size at index 0"),
    ]:
        with pytest.raises(error, match=words):
            call(*arguments)


def test_nothing_and_a_single_number_are_reduced(group):
    dist.all_reduce(nothing := ones(0))
    dist.all_reduce(number := ones(()))
    assert nothing.shape == (0,) and number.item() == 1


def test_what_only_other_backends_have(group):
    with pytest.raises(NotImplementedError, match="not support allgather_coalesced"):
        dist.all_gather_coalesced([[ones(1)]], [ones(1)])
    with pytest.raises(NotImplementedError, match="not support recvAnysource"):
        group.recv_anysource([ones(1)], 0)
    with pytest.raises(ValueError, match=r"for GLOO|\(e\.g\. GLOO\)"):
        dist.monitored_barrier()


def test_what_ddp_cannot_train(group):
    table = DDP(nn.Embedding(4, 2, sparse=True).cuda(), device_ids=[0])
    words = "with sparse tensors. Please use dense tensors instead.$"
    with pytest.raises(RuntimeError, match=f"NCCL does not support all_reduce {words}"):
        table(torch.tensor([0], device=CUDA)).sum().backward()


# -- the group as PyTorch shows it -----------------------------------------------------


def test_the_class_of_nccl(group):
    backend = group._get_backend(CUDA)
    new = TORCH >= (2, 15)  # the second engine is the usual one
    name = "nccl2" if new else "nccl"
    assert type(backend).__name__ == f"ProcessGroupNCCL{'2' if new else ''}"
    assert isinstance(backend, getattr(dist, type(backend).__name__))
    assert backend is group._get_backend(CUDA)
    assert (backend.name(), backend.rank(), backend.size()) == (name, 0, 1)
    assert group.name() == group._get_backend_name() == name
    assert dist.get_backend() == "nccl"
    assert not backend._is_initialized()
    backend.allreduce(given := ones(2)).wait()
    assert given.tolist() == [1, 1] and backend._is_initialized()
    assert group._get_sequence_number_for_group() == 1
    group._enable_collectives_timing()
    limit = timedelta(seconds=7)  # the limit is what is tested
    dist.distributed_c10d._set_pg_timeout(limit)
    assert backend.options._timeout == limit
    with pytest.raises(NotSimulated, match="register_mem_pool"):
        backend.register_mem_pool(None)
    assert len(torch.cuda.nccl.unique_id()) == 128


@pytest.mark.skipif(TORCH < (2, 14), reason="since torch 2.14")
@pytest.mark.parametrize(
    "asked, kind, name",
    [
        ("nccl-legacy", "ProcessGroupNCCL", "nccl"),
        ("nccl2", "ProcessGroupNCCL2", "nccl2"),
        ("nccl-lazy", "ProcessGroupNCCLLazy", "nccl-lazy"),
        ("cpu:gloo,cuda:nccl-lazy", "ProcessGroupNCCLLazy", "nccl-lazy"),
    ],
)
def test_every_name_of_nccl_is_a_backend(asked, kind, name):
    join(backend=asked)
    assert dist.get_backend() == asked
    backend = dist.group.WORLD._get_backend(CUDA)
    assert type(backend) is getattr(dist, kind) and backend.name() == name
    dist.all_reduce(given := ones(2))
    part = dist.new_group([0], backend=asked.rpartition(":")[2])
    dist.all_reduce(given, group=part)
    assert given.tolist() == [1, 1]
    dist.barrier()
    if "gloo" in asked:
        dist.all_reduce(host := torch.ones(1))
        assert host.item() == 1
    else:
        with pytest.raises(RuntimeError, match="cpu"):
            dist.all_reduce(torch.ones(1))


@pytest.mark.skipif(TORCH >= (2, 14), reason="until torch 2.13")
def test_names_that_are_younger_than_pytorch_are_refused():
    with pytest.warns(UserWarning, match="capability of nccl-lazy unknown"):
        with pytest.raises(AssertionError, match="Unknown backend type nccl-lazy"):
            join(backend="nccl-lazy")


@pytest.mark.skipif(TORCH < (2, 14), reason="since torch 2.14")
@pytest.mark.parametrize("chosen, kind", [("0", ""), ("1", "2")])
def test_the_environment_chooses_the_engine(chosen, kind, tmp_path):
    script = """if True:
        import simgpu, torch, torch.distributed as dist
        simgpu.start(1)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        print(type(dist.group.WORLD._get_backend(torch.device("cuda"))).__name__)
    """
    done = programs.in_new_python(tmp_path, "-c", script, TORCH_DIST_USE_NCCL2=chosen)
    assert done.stdout.strip() == f"ProcessGroupNCCL{kind}", done.stderr


@pytest.mark.skipif(TORCH < (2, 15), reason="tells of gloo alone")
def test_the_flight_recorder_tells_of_gloo_or_of_nccl(group):
    built = torch._C._distributed_c10d
    before = built._dump_fr_trace_json()  # what gloo's groups have done in this process
    dist.all_reduce(ones(1))
    assert built._dump_fr_trace_json() == before
    for backend in ("nccl", "nccl2", "nccl-lazy"):
        found = json.loads(built._dump_fr_trace_json(backend=backend))
        assert len(found["entries"]) == 1
        assert b"all_reduce" in built._dump_fr_trace(True, False, False, backend)


def test_symmetric_memory_is_refused_at_every_door(group):
    import torch.distributed._symmetric_memory as symmetric

    x, world, ops = ones(4, 4), dist.group.WORLD.group_name, torch.ops.symm_mem
    for call, *arguments in [
        (symmetric.empty, 4), (symmetric.rendezvous, x, world),
        (symmetric.get_mem_pool, CUDA), (symmetric.set_backend, "NCCL"),
        (ops.one_shot_all_reduce, x, "sum", world),
        (ops.fused_all_gather_matmul, x, [x], 0, world),
    ]:  # fmt: skip
        with pytest.raises(NotSimulated, match="symmetric memory"):
            call(*arguments)
            raise AssertionError(call)


def test_what_nccl_can_and_is_not_modelled_is_refused_by_name():
    """Flags must not let PyTorch say that no backend can do it."""
    join(device_id=torch.device("cuda", 0))
    c10d, backend = dist.distributed_c10d, dist.group.WORLD._get_backend(CUDA)
    assert backend.supports_shrinking
    calls = {"shrink": lambda: backend.shrink([0])}
    if hasattr(c10d, "_time_estimator"):
        calls["_start_time_estimate"] = lambda: c10d._time_estimator().__enter__()
    if hasattr(c10d, "_new_window"):
        assert not c10d._supports_window() and not c10d._supports_reconfigure()
        calls |= {
            "new_window": lambda: c10d._new_window(ones(2)),
            "get_reconfigure_handle": c10d._get_reconfigure_handle,
            "reconfigure": lambda: c10d._reconfigure(1, ["a"]),
        }
    for name, call in calls.items():
        with pytest.raises(NotSimulated, match=rf"ProcessGroupNCCL2?\.{name} "):
            call()


def test_a_group_beside_those_of_torch_distributed(group):
    options = dist.ProcessGroupNCCL.Options()
    other = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, options)
    other.broadcast([given := ones(2)]).wait()
    assert given.tolist() == [1, 1]
    with pytest.raises(NotSimulated, match="ProcessGroupNCCL of some ranks"):
        dist.ProcessGroupNCCL(FakeStore(), 1, 2, options)


def test_a_group_is_aborted_and_made_again(group):
    work = dist.all_reduce(ones(2), async_op=True)
    dist.distributed_c10d._abort_process_group()
    assert not dist.is_initialized() and work.is_completed() is not None
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(given := ones(2))
    assert given.tolist() == [1, 1]


def test_parts_of_a_bound_group():
    join(device_id=torch.device("cuda", 1))
    options = dist.ProcessGroupNCCL.Options()
    part = dist.split_group(split_ranks=[[0]], pg_options=options)
    assert part.group_desc == "default_pg:split:0"
    same = dist.group.WORLD.split_group([0], group_desc="mine")
    assert same.size() == 1 and same.group_desc == "mine"
    dist.all_reduce(given := torch.ones(2, device="cuda:1"), group=same)
    assert given.tolist() == [1, 1]
    assert dist.group.WORLD._get_backend(CUDA).comm_split_count() == 2
    words = "Attempt to perform collective on tensor not on device passed to init_p"
    with pytest.raises(dist.DistBackendError, match=f"{words}rocess_group$"):
        dist.all_reduce(ones(1))
    model = DDP(module=nn.Linear(2, 2).to(1), device_ids=[1])  # by keyword
    assert model(torch.ones(1, 2)).get_device() == 1


def test_connecting_at_once_leaves_the_device_to_a_mesh(monkeypatch):
    """`device_id`: C++ uses CUDA, of which PyTorch's Python is not told."""
    join(device_id=torch.device("cuda", 1))
    assert not torch.cuda.is_initialized()
    dist.barrier()
    assert not torch.cuda.is_initialized()
    monkeypatch.setenv("LOCAL_RANK", "1")
    dist.init_device_mesh("cuda", (1,))
    assert torch.cuda.current_device() == 1


def test_ranks_and_devices_may_be_numbers_of_numpy(group):
    one = numpy.int64(0)
    with pytest.raises(ValueError, match="or an integer, but got"):
        torch.cuda.set_device(one)  # PyTorch asks for Python's own here
    x = ones(2, dtype=torch.float32)
    for made in (dist.new_group([one]), dist.new_subgroups(numpy.int64(1))[0]):
        dist.all_reduce(x, group=made)
        dist.broadcast(x, one, group=made)
    places = [torch.ones(2, device=one), torch.tensor([1.0], device=one),
              torch.ones(2).to(one), torch.ones(2).cuda(one)]  # fmt: skip
    assert {str(place.device) for place in places} == {"cuda:0"}


def test_debug_detail_does_not_wrap_the_group(monkeypatch):
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        join()
        dist.all_gather_object(found := [None], {"a": 1})
        assert found == [{"a": 1}]
        hashed = torch._C._distributed_c10d._hash_tensors
        assert hashed([ones(2)]) == hashed([ones(2)]) != hashed([ones(3)])
    finally:
        dist.set_debug_level(level)


# -- barriers --------------------------------------------------------------------------


def test_a_barrier_takes_the_gpu_that_was_used_and_not_the_current_one(group):
    dist.all_reduce(torch.ones(1, device="cuda:1"))
    dist.barrier()  # the current one is cuda:0, which would be a second connection
    assert dist.group.WORLD._get_backend(CUDA)._communicator.ordinal == 1


def test_a_barrier_before_all_else_does_not_decide_for_ever(group):
    dist.barrier()
    dist.all_reduce(given := torch.ones(1, device="cuda:1"))
    assert given.item() == 1
    dist.all_reduce(torch.ones(1, device="cuda:0"))  # one more connection
    dist.barrier()
    assert dist.group.WORLD._get_sequence_number_for_group() == 4


# -- works, futures, the profiler ------------------------------------------------------


def test_the_future_of_a_list_gather_has_what_was_gathered(group):
    work = dist.all_gather([torch.empty(2, device=CUDA)], ones(2), async_op=True)
    (whole,) = work.get_future().wait()
    is_flattened = TORCH < (2, 15)  # the newer engine fills the list itself
    assert whole.shape == ((1, 2) if is_flattened else (2,)) and whole.is_cuda
    future = work.get_future().then(lambda done: done.value()[0] * 2)
    assert future.wait().flatten().tolist() == [2, 2]
    assert torch.equal(work.result()[0], whole)


def test_collectives_between_start_and_end_are_waited_for(group):
    group._start_coalescing(CUDA)
    first, second = ones(2), ones(3)
    group.allreduce([first])
    group.allreduce([second])
    group._end_coalescing(CUDA).wait()
    assert first.tolist() + second.tolist() == [1] * 5


def test_a_blocking_wait_lets_the_host_wait(group, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    work = dist.all_reduce(ones(1 << 20), async_op=True)
    before = simgpu.timeline()
    assert work.wait(timedelta(seconds=SHORT)) and work.is_completed(), before


def test_the_profiler_sees_each_collective_once(group):
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(ones(2, 3))
        dist.broadcast(ones(4), 0)
    events = {e.name: e for e in profile.function_events if e.name[:4] == "nccl"}
    assert events.keys() == {"nccl:all_reduce", "nccl:broadcast"}
    assert events["nccl:all_reduce"].input_shapes == [[2, 3]]
    assert all(event.is_async for event in events.values())


@pytest.mark.parametrize(
    ("call", "kernel"),
    [
        (lambda x: dist.all_reduce(x), "AllReduce_Sum_f32_RING_LL"),
        (lambda x: dist.all_reduce(x.bfloat16(), ReduceOp.MAX),
         "AllReduce_Sum_bf16_RING_LL"),
        (lambda x: dist.all_reduce(x.long()), "AllReduce_Sum_u64_RING_LL"),
        (lambda x: dist.all_gather_into_tensor(x, x + 0), "AllGather_RING_LL"),
        (lambda x: dist.reduce_scatter_tensor(x, x + 0),
         "ReduceScatter_Sum_f32_RING_LL"),
        (lambda x: dist.broadcast(x, 0), "Broadcast_RING_LL"),
        (lambda x: dist.all_to_all_single(x, x + 0), "SendRecv"),
        (lambda x: functional.all_reduce(x, "sum", dist.group.WORLD).wait(),
         "AllReduce_Sum_f32_RING_LL"),
        (lambda x: dist.barrier(), "AllReduce_Sum_f32_RING_LL"),
    ],
    ids=["sum", "bfloat16", "int64", "gather", "scatter", "broadcast", "all to all",
         "functional", "barrier"],
)  # fmt: skip
def test_a_profile_names_the_kernels_of_nccl(group, tmp_path, call, kernel, request):
    elements = (0, 0) if "barrier" in request.node.name else (6, 6)
    with profile() as found:
        call(ones(6))
    path = tmp_path / "trace.json"
    found.export_chrome_trace(str(path))
    rows = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    (row,) = [r for r in rows if r.get("cat") == "kernel" and "nccl" in r["name"]]
    assert row["name"] == f"ncclDevKernel_{kernel}"
    (told,) = [r["args"] for r in rows if r["name"] == "record_param_comms"]
    for about in (row["args"], told):
        assert (about["In msg nelems"], about["Out msg nelems"]) == elements
        assert about["Group size"] == 1 and about["Process Group Name"] == "0"
        assert about["Process Group Description"] == "default_pg"
    ranges = [r for r in rows if r["name"] == f"nccl:{told['Collective name']}"]
    assert [r["cat"] for r in ranges] == ["user_annotation", "gpu_user_annotation"]
    on_gpu = {
        e.key: e for e in found.key_averages() if e.device_type == DeviceType.CUDA
    }
    assert on_gpu[ranges[0]["name"]].device_time_total > 0
    assert on_gpu[row["name"]].device_time_total == pytest.approx(row["dur"])


def test_what_the_simulator_copies_is_not_in_a_profile(group):
    x, y = ones(6), ones(6)
    with profile() as found:
        dist.all_reduce(x)
        dist.all_gather_into_tensor(y, x)
        torch.cuda.synchronize()
    host = {e.key for e in found.key_averages() if e.device_type == DeviceType.CPU}
    assert {name for name in host if name.startswith("aten::")} == set()


def test_pytorch_counts_collectives_that_nobody_waited_for(group):
    """It warns of them when the process ends."""
    ops, size = torch.ops._c10d_functional, torch_C._get_work_registry_size
    before = size()
    waited = ops.all_reduce(ones(3), "sum", group.group_name)
    left = ops.all_gather_into_tensor(ones(3), 1, group.group_name)
    assert size() == before + 2
    ops.wait_tensor(waited)
    assert size() == before + 1
    assert functional.all_reduce(ones(3), "sum", group).add(1).tolist() == [2] * 3
    assert size() == before + 1
    ops.wait_tensor(left)
    assert size() == before


# -- where ranks meet ------------------------------------------------------------------


@pytest.mark.parametrize("place", ["file://", "tcp://", "FileStore", "TCPStore"])
def test_ranks_meet_wherever_pytorch_lets_them(place, tmp_path):
    file = str(tmp_path / "store")
    port = free_port()
    where = {
        "file://": lambda: {"init_method": f"file://{file}"},
        "tcp://": lambda: {"init_method": f"tcp://127.0.0.1:{port}"},
        "FileStore": lambda: {"store": dist.FileStore(file, 1)},
        "TCPStore": lambda: {"store": dist.TCPStore("127.0.0.1", 0, 1, True)},
    }
    simgpu.start(1)
    for _ in range(2):  # and once more, when the first group is gone
        dist.init_process_group("nccl", rank=0, world_size=1, **where[place]())
        dist.all_reduce(given := ones(2))
        assert given.tolist() == [1, 1]
        dist.destroy_process_group()
