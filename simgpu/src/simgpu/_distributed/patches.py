"""What is replaced of torch.distributed, rpc and multiprocessing: a part of the table.

`_patches.py` has the whole.
"""

import multiprocessing.spawn
from datetime import timedelta
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue

import torch
import torch.cuda.nccl
from torch.autograd import profiler_util
from torch.distributed import constants, device_mesh, distributed_c10d
from torch.distributed.rpc import api, internal
from torch.nn.parallel import DistributedDataParallel

from simgpu._api import sharing
from simgpu._api.patch import Patch, patches
from simgpu._compat import (
    CppFuture,
    DDPJoinHook,
    FakeProcessGroup,
    RPCPickler,
    Work,
    distributed_C,
    raw_root_copy_hook,
    raw_wrap_process_group,
    rpc_C,
    torch_C,
)
from simgpu._distributed import (
    callbacks,
    children,
    collectives,
    ddp,
    flight_recorder,
    functional,  # noqa: F401 - registers what runs operations
    futures,
    groups,
    left_out,
    nccl,
    one_process,
    profiling,
    reductions,
    rpc,
    splitting,
    symmetric_memory,
    work,
)


def table() -> list[Patch]:
    """torch.distributed and multiprocessing."""
    # PyTorch's own time limit, where it is built with NCCL
    limit = {"default_pg_nccl_timeout": timedelta(minutes=10)}
    return [
        *patches(
            distributed_c10d, "the simulator stands for NCCL",
            split_group=splitting.split_group,
            _new_process_group_helper=groups.new_group, rendezvous=groups.rendezvous,
            _get_object_coll_device=groups.object_device,
            _get_split_source=groups.split_source,
            _create_process_group_wrapper=nccl.unwrapped(
                raw_wrap_process_group
            ),
            is_nccl_available=lambda: True, **nccl.engines(), **limit,
        ),
        *patches(device_mesh, "the simulator stands for NCCL",
                 split_group=splitting.split_group),
        *patches(constants, "the simulator stands for NCCL", **limit),
        *patches(torch.distributed, "the simulator stands for NCCL",
                 is_nccl_available=lambda: True, split_group=splitting.split_group,
                 **nccl.engines(),
                 _make_nccl_premul_sum=reductions.make_premul_sum),
        *patches(
            torch.distributed.ProcessGroup, "the simulator stands for NCCL",
            barrier=groups.barrier, shutdown=groups.shutdown, abort=nccl.abort,
            name=nccl.name, _get_backend=nccl.get_backend,
            _get_backend_name=nccl.backend_name, split_group=splitting.split_of,
            _enable_collectives_timing=nccl.enable_timing,
            _register_on_completion_hook=nccl.register_on_completion_hook,
            _wait_for_pending_works=nccl.wait_for_pending_works,
            **nccl.since_2_14(), **left_out.methods(),
            _get_sequence_number_for_group=nccl.sequence_number,
            _set_sequence_number_for_group=nccl.begin_sequence,
            _start_coalescing=collectives.start_coalescing,
            _end_coalescing=collectives.end_coalescing,
        ),
        *patches(profiler_util.FunctionEvent, "a collective ends later",
                 __init__=profiling.new_event),
        *patches(distributed_C, "only builds with NCCL have it",
                 _hash_tensors=nccl.hash_tensors,
                 _dump_nccl_trace=flight_recorder.dump,
                 _dump_nccl_trace_json=flight_recorder.dump_json,
                 _reset_fr_recording_nccl=flight_recorder.reset,
                 **nccl.recorders()),
        *patches(symmetric_memory.SymmetricMemory, "it maps the memory of other GPUs",
                 **symmetric_memory.doors()),
        *patches(FakeProcessGroup, "the simulator stands for NCCL",
                 supports_coalescing=property(groups.supports_coalescing)),
        *[
            patch
            for options in reductions.OPTIONS
            for patch in patches(options, "C++ does not give the factor back",
                                 reduceOp=reductions.noting_factor(options))
        ],
        *patches(CppFuture, "hooks run in our modes, on a stream of their own",
                 then=callbacks.then, add_done_callback=callbacks.add_done_callback),
        *patches(torch.futures, "C++ forgets what a future waits for",
                 collect_all=callbacks.collect_all, wait_all=callbacks.wait_all),
        *patches(CppFuture, "streams wait, and not the program",
                 wait=callbacks.wait, value=callbacks.value),
        *patches(Work, "streams wait, and not the program", **work.methods()),
        *patches(torch.distributed, "C++ takes several GPUs for one device",
                 Reducer=ddp.reducer),
        *patches(
            DistributedDataParallel, "its reducer makes tensors in C++",
            **{name: ddp.on_replica(name)
               for name in ("__init__", "__setstate__", "_pre_forward",
                            "_post_forward")},
        ),
        *patches(
            DistributedDataParallel, "C++'s hook copies without a stream that waits",
            _register_builtin_comm_hook=ddp.register_builtin_hook,
        ),
        *patches(
            DistributedDataParallel, "its stream does not wait for the optimizer",
            _root_copy_hook=ddp.cast_in_order(raw_root_copy_hook),
        ),
        *patches(
            DDPJoinHook, "its reducer makes tensors in C++",
            main_hook=ddp.in_join("main_hook"), post_hook=ddp.in_join("post_hook"),
        ),
        *patches(
            torch.distributed, "C++ waits for its collectives",
            _broadcast_coalesced=ddp.broadcast_coalesced,
            _verify_params_across_processes=ddp.verify,
        ),
        *patches(torch.futures.Future, "values on GPUs are in the order of streams",
                 __init__=futures.new, set_result=futures.set_result,
                 then=futures.then),
        *patches(torch.cuda.nccl, "the simulator stands for NCCL",
                 version=groups.nccl_version, unique_id=nccl.unique_id),
        *patches(torch_C, "the simulator stands for NCCL", **one_process.C_FUNCTIONS),
        *_rpc(),
        *patches(Queue, "a thread of the queue sends, which must not move memory",
                 put=sharing.put),
        *patches(multiprocessing.spawn, "children have the same GPUs",
                 get_preparation_data=children.preparation_data),
        *patches(BaseProcess, "a child with gloo must not abort at its end",
                 _bootstrap=children.bootstrap),
    ]  # fmt: skip


def _rpc() -> list[Patch]:
    """torch.distributed.rpc, whose C++ knows CPU tensors."""
    why = "C++ takes a GPU tensor for one of the CPU"
    return [
        *patches(RPCPickler, why,
                 serialize=rpc.serialize, deserialize=rpc.deserialize),
        *patches(api, why, **rpc.INVOKE),
        *patches(torch.distributed.rpc.PyRRef, why, to_here=rpc.to_here),
        *patches(torch.distributed.rpc, why, TensorPipeAgent=rpc.new_agent),
        *patches(rpc_C.TensorPipeAgent, why,
                 _get_device_map=rpc.get_device_map),
        *patches(torch.distributed.autograd, why,
                 backward=rpc.backward, get_gradients=rpc.get_gradients),
        *patches(internal, "threads of C++ have no modes",
                 _run_function=rpc.run_function),
    ]  # fmt: skip
