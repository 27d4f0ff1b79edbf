"""All of PyTorch and Python that is replaced while GPUs are simulated, in one table.

`table(runtime)` lists it, and takes in the part for ranks (`_distributed/patches.py`);
`_startup.start()` applies it and `stop()` undoes it. Elsewhere only the kernels of
`torch.autocast` are replaced (`_api/autocast.py`), those of FakeTensors
(`_api/fake_tensors.py`), and how a command starts others (`_launchers.py`, `_launch/`).
Operations of PyTorch are not replaced: the dispatch mode sees them (`_dispatch/`).
"""

import sys
import threading
from concurrent.futures import Future
from concurrent.futures.thread import _WorkItem

import torch
import torch.accelerator.memory
import torch.backends.cudnn.rnn
import torch.compiler
import torch.cuda.nvtx
import torch.utils.dlpack
from torch.autograd.function import BackwardCFunction
from torch.storage import UntypedStorage

from simgpu import _compat as compat
from simgpu._api import (
    asking,
    attention,
    autocast,
    autograd,
    backends,
    compiling,
    cuda_events,
    cuda_graphs,
    cudart,
    data_parallel,
    device_checks,
    devices,
    dropout,
    extensions,
    fake_tensors,
    flex_attention,
    function_modes,
    functions,
    gradient_hooks,
    making,
    mem_pools,
    memory,
    moving,
    naming,
    native,
    nvml,
    nvtx,
    profiler,
    random_generators,
    recurrent,
    refused,
    script_devices,
    sharing,
    storages,
    streams,
    tensor_memory,
    tensor_types,
    threads,
    torchscript,
    warning_lines,
)
from simgpu._api.asking import Property
from simgpu._api.patch import Patch, patches
from simgpu._compat import (
    PythonStorageBase,
    device_constructors,
    is_absent,
    parallel_functions,
    refusals,
    torch_C,
    torch_C_nn,
)
from simgpu._distributed import patches as ranks
from simgpu._request import MOST_GPUS

# it keeps what it finds at its first call: PyTorch's own functions, and not ours
if not is_absent(device_constructors):
    device_constructors()


def table(runtime) -> list[Patch]:
    """Every replacement, for the runtime that is about to start."""
    answered = [*_tensors(), *_torch(), *_cuda(runtime), *_threads(), *ranks.table()]
    absent = [Patch(*row, "PyTorch lacks what it needs") for row in refusals()]
    return [*answered, *_refused(answered), *absent]


def _tensors() -> list[Patch]:
    """Methods of tensors and storages."""
    return [
        *patches(
            torch.Tensor, "moves between simulated devices",
            to=moving.to, cuda=moving.cuda, cpu=moving.cpu, copy_=moving.copy_,
            type_as=moving.type_as, __setitem__=moving.setitem,
        ),
        *patches(
            torch.ops.aten.to, "C++ sees no change of device", "call",
            device=moving.to_overload, dtype_layout=moving.to_overload,
        ),
        *patches(
            torch.Tensor, "C++ knows a CPU tensor; the device is on its storage",
            device=Property(asking.device_of), is_cuda=Property(asking.is_cuda),
            is_cpu=Property(asking.is_cpu), is_meta=Property(asking.is_meta),
            get_device=asking.get_device,
            type=asking.type_of, __repr__=asking.represent,
        ),
        *patches(
            torch.Tensor, "C++ sees two CPU tensors and compares no devices",
            grad=Property(asking.get_grad, asking.set_grad, asking.delete_grad),
        ),
        *patches(
            torch.Tensor, "a GPU tensor must be copied before it leaves PyTorch",
            numpy=tensor_memory.numpy, tolist=tensor_memory.tolist,
            __reduce_ex__=tensor_memory.reduce_ex,
            __dlpack__=tensor_memory.dlpack,
            __dlpack_device__=tensor_memory.dlpack_device,
            __cuda_array_interface__=Property(tensor_memory.cuda_array_interface),
        ),
        *patches(
            torch.utils.dlpack, "a simulated GPU has no memory to share",
            to_dlpack=tensor_memory.to_dlpack,
        ),
        *patches(
            torch.Tensor, "memory is simulated: addresses, pinning, streams, sharing",
            pin_memory=tensor_memory.pin_memory, is_pinned=tensor_memory.is_pinned,
            record_stream=tensor_memory.record_stream,
            data_ptr=tensor_memory.data_ptr,
            share_memory_=tensor_memory.share_memory_,
            is_shared=tensor_memory.is_shared,
        ),
        *patches(torch.Tensor, "builds its result in C++", new=making.new),
        *patches(torch.Tensor, "C++ sees two CPU tensors and compares no devices",
                 set_=storages.set_),
        *patches(
            torch.Tensor, "C++ would ask for CUDA",
            _make_wrapper_subclass=staticmethod(making.make_wrapper_subclass),
        ),
        *patches(
            torch.Tensor, "a subclass is made of what no mode has seen",
            __new__=staticmethod(making.new_tensor_object),
        ),
        *patches(
            torch.Tensor, "builds its result in C++", "both",
            new_tensor=making.new_tensor,
        ),
        *patches(
            torch.Tensor, "CUDA wants the indices on the host", "call",
            tensor_split=functions.tensor_split,
        ),
        *patches(
            UntypedStorage, "the device and the memory are simulated",
            device=Property(storages.device), data_ptr=storages.data_ptr,
            resize_=storages.resize_, __new__=staticmethod(storages.new),
            __getitem__=storages.getitem, new=storages.new_like,
            is_shared=storages.is_shared,
        ),
        *patches(
            UntypedStorage, "other processes may map the memory",
            _share_cuda_=sharing.share_cuda,
            _new_shared_cuda=staticmethod(sharing.new_shared_cuda),
            _release_ipc_counter_cuda=staticmethod(sharing.release_ipc_counter),
        ),
        *patches(
            PythonStorageBase, "copies of GPU memory",
            clone=storages.clone, cpu=storages.cpu, cuda=storages.cuda, to=storages.to,
        ),
    ]  # fmt: skip


def _torch() -> list[Patch]:
    """Functions of torch, of autograd and of what they call in C++."""
    return [
        *patches(
            torch, "builds its result in C++", "both",
            tensor=making.tensor, as_tensor=making.as_tensor, asarray=making.asarray,
            **making.sparse_factories,
        ),
        *patches(torch, "asks no mode what its device means", range=making.range),
        *patches(
            torch, "asks C++ for the device", "both", get_device=asking.get_device
        ),
        *patches(
            torch, "torch.device(1) asks C++ for an accelerator", "call",
            device=naming.new_device,
        ),
        *patches(
            torch, "CUDA wants the indices on the host", "call",
            tensor_split=functions.tensor_split,
        ),
        *patches(
            torch.nn.functional, "the CPU's checks its values", "call",
            one_hot=functions.one_hot,
        ),
        *patches(torch, "CUDA fuses it", "call", dropout=dropout.dropout),
        *patches(torch.nn.functional, "CUDA fuses it", "call",
                 dropout=dropout.functional),
        *patches(
            torch, "CUDA reads the lengths on the host", ctc_loss=functions.ctc_loss
        ),
        *patches(
            torch, "old names that mean a device",
            set_default_tensor_type=tensor_types.set_default_tensor_type,
            **tensor_types.tensor_types(torch, on_gpu=False),
        ),
        *patches(
            torch.cuda, "old names that mean a device",
            **tensor_types.tensor_types(torch.cuda, on_gpu=True),
        ),
        *patches(
            torch_C_nn, "Module.to(1) asks C++ for an accelerator", "both",
            _parse_to=moving.parse_module_to,
        ),
        *patches(
            torch_C_nn, "C++ would choose a kernel of the CPU", "call",
            scaled_dot_product_attention=attention.scaled_dot_product_attention,
        ),
        *patches(
            torch.nn.functional, "it calls this where the function mode is off",
            scaled_dot_product_attention=attention.in_functional,
        ),
        *device_checks.rows(),
        *patches(
            compat, "its backward pass would trace FakeTensors",
            "call", flex_attention_operator=flex_attention.operator,
        ),
        *extensions.rows(),
        *torchscript.rows(),
        *script_devices.rows(),
        *warning_lines.rows(),
        *patches(
            torch_C, "PyTorch's tests count the modes that they leave behind",
            _len_torch_function_stack=function_modes.length,
            _pop_torch_function_stack=function_modes.pop,
        ),
        *patches(
            torch_C, "optimizers group tensors by device",
            _group_tensors_by_device_and_dtype=functions.group_by_device_and_dtype,
        ),
        *patches(
            torch.autograd, "the engine compares the devices of gradients",
            _engine_run_backward=autograd.run_backward,
        ),
        *patches(
            torch.Tensor, "the engine compares what hooks return",
            register_hook=gradient_hooks.register_hook,
        ),
        *patches(
            torch.autograd.Function, "the engine compares what hooks return",
            _register_hook=staticmethod(gradient_hooks.register),
        ),
        *patches(
            torch.autograd.Function, "its node must know where its tensors are",
            apply=classmethod(autograd.apply_function),
        ),
        *patches(
            BackwardCFunction, "the engine makes and compares its gradients",
            apply=autograd.apply_backward,
        ),
        *patches(
            torch, "autocast for CUDA needs kernels and a cache",
            set_autocast_enabled=autocast.set_enabled,
            clear_autocast_cache=autocast.clear_cache,
        ),
        *patches(torch, "it makes kernels for a GPU", compile=compiling.compile),
        *patches(torch.compiler, "nothing has been compiled",
                 reset=lambda: None, cudagraph_mark_step_begin=lambda: None),
        *fake_tensors.rows(),
    ]  # fmt: skip


def _cuda(runtime) -> list[Patch]:
    """torch.cuda, torch.accelerator, and what they ask of C++."""
    random = {
        name: getattr(random_generators, name)
        for name in ("manual_seed", "manual_seed_all", "seed", "seed_all",
                     "initial_seed", "get_rng_state", "get_rng_state_all",
                     "set_rng_state", "set_rng_state_all")
    }  # fmt: skip
    same_stream_classes = {
        "Stream": streams.CudaStream, "Event": cuda_events.CudaEvent,
        "ExternalStream": streams.ExternalStream,
    }  # fmt: skip
    rt, flags = cudart.Cudart(), backends.Flags()
    return [
        *patches(
            torch.cuda, "which GPUs there are",
            is_available=devices.is_available, device_count=devices.device_count,
            get_device_name=devices.get_device_name,
            get_device_capability=devices.get_device_capability,
            get_device_properties=devices.get_device_properties,
            can_device_access_peer=devices.can_device_access_peer,
            get_arch_list=devices.get_arch_list,
            is_bf16_supported=devices.is_bf16_supported,
        ),
        *patches(
            torch.cuda, "which GPU is current",
            current_device=devices.current_device, set_device=devices.set_device,
            _exchange_device=devices.exchange_device,
            _maybe_exchange_device=devices.exchange_device,
        ),
        *patches(
            torch.cuda, "there is no CUDA to initialise",
            init=devices.init, _lazy_init=devices.init,
            is_initialized=devices.is_initialized,
            _is_in_bad_fork=devices.is_in_bad_fork,
            _initialized=True,  # checkpoints ask, to keep random states
        ),
        *patches(torch.cuda.memory, "there is no CUDA", _lazy_init=devices.init),
        *patches(torch_C, "there is no CUDA below", **native.C_FUNCTIONS,
                 **native.absent_classes()),
        *patches(torch.cuda, "there is no CUDA below", cudart=lambda: rt, _cudart=rt),
        *_nvml(),
        *patches(torch_C, "C++ keeps these where CUDA is", **flags.c_functions()),
        *patches(torch, "C++ keeps these where CUDA is", "call",
                 **flags.plan_cache_functions()),
        *patches(type(torch.backends.cudnn), "C++ keeps these where CUDA is",
                 benchmark_limit=flags.limit_property()),
        *patches(torch, "C++ has a CPU's weights below",
                 _use_cudnn_rnn_flatten_weight=lambda: True,
                 _cudnn_rnn_flatten_weight=recurrent.flatten_weight),
        *patches(torch.backends.cudnn.rnn, "PyTorch for the CPU has no cuDNN to ask",
                 get_cudnn_mode=recurrent.mode_of_cudnn),
        *patches(torch.backends.cudnn.m, "programs ask", version=backends.cudnn_version,
                 is_available=lambda: True, _init=lambda: True),
        *patches(torch.cuda, "waits in simulated time",
                 synchronize=devices.synchronize),
        *memory.rows(),
        *mem_pools.rows(),
        *patches(torch_C, "there is no CUDA to initialise",
                 _cuda_isInBadFork=devices.is_in_bad_fork),
        *patches(torch_C, "other processes may map the memory",
                 _cuda_ipc_collect=sharing.ipc_collect),
        *patches(torch.cuda, "random numbers of each GPU", **random,
                 default_generators=runtime.generators),
        *patches(torch.cuda.random, "random numbers of each GPU", **random),
        *patches(torch, "random numbers of each GPU",
                 Generator=random_generators.Generator),
        *patches(torch, "streams are simulated",
                 Stream=streams.Stream, Event=cuda_events.Event),
        *patches(torch.cuda, "streams are simulated", **same_stream_classes,
                 current_stream=streams.current_stream,
                 default_stream=streams.default_stream, set_stream=streams.set_stream),
        *patches(torch.cuda.streams, "streams are simulated", **same_stream_classes),
        *cuda_graphs.rows(),
        *patches(torch.cuda.nvtx, "there is no profiler", _nvtx=nvtx.Nvtx()),
        *profiler.rows(),
        *patches(torch.version, "programs ask", cuda=devices.CUDA_VERSION),
        *patches(torch.backends.cuda, "programs ask", is_built=lambda: True),
        *patches(
            torch.accelerator, "the accelerator is the simulated GPU",
            is_available=devices.is_available, device_count=devices.device_count,
            current_accelerator=devices.current_accelerator,
            current_device_index=devices.current_device,
            current_device_idx=devices.current_device,
            set_device_index=devices.set_device, set_device_idx=devices.set_device,
            device_index=devices.device_index, synchronize=devices.synchronize,
            get_memory_info=memory.mem_get_info,
            current_stream=streams.accelerator_stream, set_stream=streams.set_stream,
        ),
        *patches(torch_C, "the accelerator is the simulated GPU",
                 _get_accelerator=devices.get_accelerator),
        *patches(torch_C, "nn.DataParallel's copies between GPUs",
                 **data_parallel.C_FUNCTIONS),
        *patches(parallel_functions, "one stream for each GPU",
                 _streams=[None] * MOST_GPUS),
    ]  # fmt: skip


def _nvml() -> list[Patch]:
    """NVML for `torch.cuda`; for the program, too, if its package is installed."""
    why, pynvml = "there is no NVML", nvml.module()
    rows = [
        *patches(torch.cuda, why, pynvml=pynvml, _HAS_PYNVML=True,
                 _get_nvml_device_index=nvml.nvml_index),
        *patches(torch.cuda.memory, why, _get_nvml_device_index=nvml.nvml_index),
    ]  # fmt: skip
    if nvml.is_installed():
        return [*rows, *patches(sys.modules, why, "item", pynvml=pynvml)]
    for module, name in ((torch.cuda, "_get_pynvml_handler"),
                         (torch.cuda, "list_gpu_processes"),
                         (torch.cuda.memory, "list_gpu_processes")):  # fmt: skip
        within = nvml.importing(getattr(module, name), pynvml)
        rows += patches(module, why, **{name: within})
    return rows


def _threads() -> list[Patch]:
    """Threads see the GPUs, and each has a time of its own."""
    return [
        *patches(
            threading.Thread, "modes and simulated time are per thread",
            start=threads.start, join=threads.join, _bootstrap_inner=threads.run_thread,
        ),
        *patches(
            _WorkItem, "threads of a pool may be older than the simulator",
            __init__=threads.new_item, run=threads.run_item,
        ),
        *patches(
            Future, "who asks for a result is at least as late as it",
            set_result=threads.set_result, set_exception=threads.set_exception,
            result=threads.result, exception=threads.exception,
        ),
    ]  # fmt: skip


def _refused(answered: list[Patch]) -> list[Patch]:
    """What has no answer raises NotSimulated and names the call."""
    families = (torch.cuda, torch.accelerator)
    known = {(p.owner.__name__, p.name) for p in answered if p.owner in families}
    return [
        Patch(owner, name, new, "not simulated")
        for owner, name, new in refused.unanswered(known, memory.KEPT)
    ]
