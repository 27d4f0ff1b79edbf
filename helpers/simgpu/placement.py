"""On which simulated GPU each tensor lives, and what may be computed with what.

Tensors stay plain CPU tensors. Each *storage* carries a `Block` that names its GPU, so
views and in-place operations need no code, and the block's bytes are given back when
the storage dies. A dispatch mode sees every operation below autograd: it finds the
device from `device=` or from the inputs, refuses to mix devices in PyTorch's own words,
runs the operation on the CPU, and marks the new storages.

Models: placement, device errors, copies, random numbers of each GPU. Leaves out:
what TorchScript moves inside its own interpreter, and the method names in a few
messages (a real GPU says `cudnn_...` where the CPU runs something else).

Terms: a tensor is *on* a `Gpu` or on None, the host. A tensor is *C++-born* when
PyTorch's C++ made it without a tensor to look at (zeros in a backward formula, say):
to C++ everything here is a CPU tensor, so it asks for the CPU. In backward, the graph
tells which GPU is meant (`_gpu_of_node`); elsewhere the tensor joins the GPU of the
first operation in the same call that uses it, or else that of the call's inputs.
"""

import contextlib
import functools
import re
import sys
import threading
import weakref
from collections import deque
from pathlib import Path

import torch
from torch.autograd.function import BackwardCFunction
from torch.cuda._utils import _get_device_index
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.simgpu.cards import Card
from helpers.simgpu.memory import Memory

aten = torch.ops.aten
_Tensor = torch.Tensor
_Base = torch._C.TensorBase
_storage_of = _Base.untyped_storage
_HOST = torch.device("cpu")
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_CONJUGATE = torch._C.DispatchKey.Conjugate
_NEGATIVE = torch._C.DispatchKey.Negative
_CPU_KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_active_mode = torch._C._get_dispatch_mode
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_PLAIN = _Tensor.__torch_dispatch__  # of tensors on which PyTorch's own kernels run


class NotSimulated(NotImplementedError):
    """The simulator does not have this call, and will not guess."""

    def __init__(self, call: str, advice: str = ""):
        super().__init__(
            f"{call} is not simulated. {advice or 'It needs a real GPU.'} "
            "(helpers.simgpu)"
        )


running = None  # the Simulator of this process, set by start() and stop()


def current():
    """The running `Simulator`.

    Raises:
        RuntimeError: if there is none.
    """
    if running is None:
        raise RuntimeError(
            "no simulated GPUs are running; call simgpu.start(4) or need_gpus(4) first"
        )
    return running


def gpu_named(device=None) -> "Gpu":
    """The GPU that `device` names; None and negative numbers are the current one.

    Raises:
        ValueError: if it is not a CUDA device.
    """
    index = _get_device_index(device, optional=True)
    return current().find(torch.device("cuda") if index < 0 else index)


class Gpu:
    """One simulated GPU: its card, its memory and its random numbers."""

    def __init__(self, index: int, card: Card, total: int, ordinal: int):
        self.index = index  # as the program counts
        self.ordinal = ordinal  # as the machine counts (CUDA_VISIBLE_DEVICES)
        self.device = torch.device("cuda", index)
        self.card = card
        self.memory = Memory(index, total)
        self.streams_made: dict[int, int] = {}  # priority -> how many
        self.generator = torch._C.Generator()
        self.alive = True  # False once the simulator has stopped


# address of a generator in C++ -> the Python object that knows its GPU
gpu_generators: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


class Allocation:
    """Marks a storage as living on a GPU; its memory is freed with the storage."""

    __slots__ = ("gpu", "nbytes", "block")

    def __init__(self, gpu: Gpu, nbytes: int, stream: int):
        __tracebackhide__ = True
        self.block = None  # should allocate() refuse, __del__ has nothing to free
        self.gpu = gpu
        self.nbytes = nbytes
        self.block = gpu.memory.allocate(nbytes, stream)

    def resize(self, nbytes: int) -> None:
        """The storage has grown or shrunk in place."""
        __tracebackhide__ = True
        block = self.gpu.memory.allocate(nbytes, _stream_number(self.gpu))
        if self.block is not None:
            self.gpu.memory.free(self.block)
        self.block, self.nbytes = block, nbytes

    def __del__(self):
        if self.block is not None:
            self.gpu.memory.free(self.block)


def _stream_number(gpu: Gpu) -> int:
    """The number of this thread's current stream on a GPU."""
    return running.thread.streams.get(gpu.index, 0) if running else 0


# -- where a tensor is -----------------------------------------------------------------


def gpu_of_storage(storage) -> Gpu | None:
    """The simulated GPU on which an UntypedStorage lives, or None."""
    its = getattr(storage, "_simgpu", None)
    return its.gpu if its is not None and its.gpu.alive else None


def _mark_of(tensor: torch.Tensor) -> Allocation | None:
    """What marks a tensor as living on a GPU that still runs."""
    with torch._C.DisableTorchFunction():  # no mode and no subclass need see this
        try:
            its = _storage_of(tensor)._simgpu
        except AttributeError:
            return None
        except (NotImplementedError, RuntimeError):  # it has no storage of its own
            parts = _parts_of(tensor)
            return _mark_of(parts[-1]) if parts else None
    return its if its.gpu.alive else None


def gpu_of(tensor: torch.Tensor) -> Gpu | None:
    """The simulated GPU on which `tensor` lives, or None."""
    its = _mark_of(tensor)
    return None if its is None else its.gpu


def block_of(tensor: torch.Tensor):
    """The allocator's block in which a GPU tensor lives, or None."""
    its = _mark_of(tensor)
    return None if its is None else its.block


def _memory_of(tensor: torch.Tensor) -> list[tuple]:
    """Where a GPU tensor lies: (tensor, block), for each part of a sparse one."""
    parts = [tensor] if tensor.layout is torch.strided else _parts_of(tensor)
    found = [(part, block_of(part)) for part in parts]
    return [(part, block) for part, block in found if block is not None]


def _parts_of(tensor) -> list[torch.Tensor]:
    """What a tensor without a storage is made of: sparse ones, and functorch's."""
    if not is_plain(tensor):
        return []
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return [torch._C._functorch.get_unwrapped(tensor)]
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        if tensor.layout == torch.sparse_coo:
            return [_Base._indices(tensor), _Base._values(tensor)]
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return [
                _Base.crow_indices(tensor),
                _Base.col_indices(tensor),
                _Base.values(tensor),
            ]
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            return [
                _Base.ccol_indices(tensor),
                _Base.row_indices(tensor),
                _Base.values(tensor),
            ]
    return []


def is_plain(tensor) -> bool:
    """Whether PyTorch's own kernels run on it (no FakeTensor, DTensor, ...)."""
    return type(tensor).__torch_dispatch__ is _PLAIN


def place(tensor: torch.Tensor, gpu: Gpu | None) -> torch.Tensor:
    """Mark a new tensor as living on `gpu`; one that is marked stays where it is."""
    __tracebackhide__ = True
    if gpu is None:
        return tensor
    try:
        storage = _storage_of(tensor)
    except (NotImplementedError, RuntimeError):
        for part in _parts_of(tensor):
            place(part, gpu)
        return tensor
    nbytes = storage.nbytes()
    its = getattr(storage, "_simgpu", None)
    if its is None or not its.gpu.alive:
        storage._simgpu = Allocation(gpu, nbytes, _stream_number(gpu))
    elif its.nbytes != nbytes:
        its.resize(nbytes)
    return tensor


# -- what the operations need ----------------------------------------------------------


class _Op:
    """What the mode must know of one operation; made once an operation."""

    __slots__ = (
        "name", "arguments", "writes", "makes", "has_device", "random", "silent",
        "factory", "gathers", "sizes", "run",
    )  # fmt: skip

    def __init__(self, func):
        self.name = func._schema.name.removeprefix("aten::")
        self.arguments = {a.name: a for a in func._schema.arguments}
        self.writes = [
            a.name
            for a in func._schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
        ]
        returns = func._schema.returns  # new tensors, and not its arguments?
        self.makes = bool(returns) and not any(r.alias_info for r in returns)
        self.has_device = "device" in self.arguments
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        # launches nothing on a GPU: views, and memory that nobody fills
        self.silent = func.is_view or self.name in _SILENT
        # reads nothing of its tensors but their shapes and the like
        self.factory = self.name.startswith("new_") or self.name.endswith("_like")
        self.gathers = self.name in _GATHERS
        # the host must read how large the result is before it can go on
        by_mask = self.name == "index"  # only if a mask is among its indices
        self.sizes = torch.Tag.dynamic_output_shape in func.tags and not by_mask
        self.run = special.get(self.name)
        if self.run is None and _is_composite(func):
            self.run = Placement._decompose
        if _has_python_kernel(func):
            self.run = Placement._run_python_kernel
        self.run = of_namespace.get(func.namespace, self.run)

    def accesses(self, args, kwargs) -> tuple[list, list]:
        """What it reads and what it writes: (argument, tensor, block)."""
        reads, writes = [], []
        values = [*zip(self.arguments.values(), args, strict=False)]
        values += [(self.arguments[name], value) for name, value in kwargs.items()]
        for argument, value in values:
            alias = argument.alias_info
            found = writes if alias is not None and alias.is_write else reads
            for tensor in tensors_in((value,)):
                found += [(argument.name, *place) for place in _memory_of(tensor)]
        return [] if self.factory else reads, writes


def _seeing(key):
    """A mode may run with this key off, and then a lazy `conj()` would be lost."""
    return torch._C._SetExcludeDispatchKeyGuard(key, False)


def _is_composite(func) -> bool:
    """Whether PyTorch writes it in terms of others; seen in inference mode only."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)


def _has_python_kernel(func) -> bool:
    """Whether `torch.library` registered Python code as this operation's kernel."""
    name = func._schema.name
    space, _, rest = name.partition("::")
    keys = ("CPU", "CompositeExplicitAutograd")
    registered = getattr(torch.library, "_impls", set())
    overload = f".{func._schema.overload_name}" if func._schema.overload_name else ""
    return name in torch._library.custom_ops.OPDEFS or any(
        f"{space}/{rest}{overload}/{key}" in registered for key in keys
    )


_SILENT = {
    "detach", "alias", "empty", "empty_like", "empty_strided", "new_empty",
    "new_empty_strided", "set_", "resize_", "_unsafe_view", "lift_fresh", "lift",
    "_sparse_coo_tensor_with_dims_and_tensors", "_coalesced_", "_reshape_alias",
}  # fmt: skip
# they read of their first tensor only what they return
_GATHERS = {"embedding", "index", "index_select", "gather", "take", "_unsafe_index"}
special = {}  # operation name -> method of Placement, or a function, that runs it
of_namespace = {}  # namespace of operations -> a function that runs them
_OPS: dict = {}


def _special(*names):
    def register(method):
        special.update(dict.fromkeys(names, method))
        return method

    return register


def tensors_in(values) -> list[torch.Tensor]:
    """The tensors among arguments or results, also inside lists."""
    found = []
    for value in values:
        if isinstance(value, _Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, _Tensor)]
    return found


class _PerThread(threading.local):
    """State of one thread."""

    current = 0  # index of the current GPU
    chosen_in = None  # the backward node in whose code it was chosen
    calls = 0  # torch functions called so far: tells two calls apart
    moving = False  # this very copy was asked for by the program
    quiet = 0  # greater than 0: nothing is logged (a tensor is being printed)
    asked_for_host = False  # this very factory call says device="cpu"
    streams: dict[int, int]  # GPU -> number of the current stream, if not 0
    born = None  # the C++ call in which a C++-born tensor was last made
    born_on = None  # the GPU on which C++-born tensors are, where that is known

    def __init__(self):  # in each thread that looks
        self.streams = {}


_random_lock = threading.RLock()  # one thread at a time uses the host's generator
_NOTHING = contextlib.nullcontext()
# files of the frames between a call and the mode: this one, and torch._disable_dynamo's
_MACHINERY = {
    __file__,
    torch._compile.__file__,
    str(Path(torch.__file__).parent / "_dynamo" / "eval_frame.py"),
}


class Placement(TorchDispatchMode):
    """Sees every operation below autograd. One for each thread, over one `sim`."""

    def __init__(self, sim):
        super().__init__()
        self.sim = sim

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: the wrapper would import torch._dynamo and slow every operation."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        __tracebackhide__ = True  # notebooks then show the learner's lines only
        if self.sim is not running:  # this thread has outlived its simulator
            if running is None:
                return func(*args, **(kwargs or {}))
            self.sim = running
        if _active_mode(_FAKE) is not None:  # nothing is computed: pass it through
            return func(*args, **(kwargs or {}))
        if types and any(kind.__torch_dispatch__ is not _PLAIN for kind in types):
            return NotImplemented  # tensor subclasses unwrap themselves first
        op = _OPS.get(func)
        if op is None:
            op = _OPS[func] = _Op(func)
        kwargs = kwargs or {}
        tensors = tensors_in(args)
        if kwargs:
            tensors += tensors_in(kwargs.values())
        if op.run is not None:
            return op.run(self, op, func, args, kwargs, tensors)
        if op.has_device:
            return self._create(op, func, args, kwargs, tensors)
        gpu = self._meet(func, args, tensors)
        return self._run(op, func, args, kwargs, tensors, gpu)

    # -- the usual way -----------------------------------------------------------------

    def _meet(self, func, args, tensors) -> Gpu | None:
        """The one GPU (or None) of an operation's inputs."""
        __tracebackhide__ = True
        if not tensors:
            return None
        gpus = [gpu_of(tensor) for tensor in tensors]
        first = gpus[0]
        for gpu in gpus:
            if gpu is not first:
                return self._reconcile(func, args, tensors, gpus)
        return first

    def _reconcile(self, func, args, tensors, gpus) -> Gpu:
        """Inputs on several devices: let in who may join, or refuse."""
        __tracebackhide__ = True
        gpu = next(gpu for gpu in gpus if gpu is not None)
        for tensor, its in zip(tensors, gpus, strict=True):
            if its is gpu:
                continue
            if its is None and tensor.device.type == "meta":
                continue
            if its is None and self._is_born_here(tensor):
                place(tensor, gpu)
            elif its is None and tensor.dim() == 0 and _joins_scalars(func):
                _send_gradient_home(tensor)
            else:
                raise RuntimeError(_mismatch(func, args, tensors, gpus))
        return gpu

    def _run(self, op, func, args, kwargs, tensors, gpu):
        """Run on the CPU, mark the results, log and time it."""
        __tracebackhide__ = True
        if op.random:
            _check_generator(kwargs.get("generator"), gpu)
        if gpu is None:
            with _random_lock if op.random else _NOTHING:
                out = func(*args, **kwargs)
            if self.sim.thread.born is not None:
                self._inherit_birth(tensors, out)
            return out
        logged = not op.silent and not self.sim.thread.quiet
        if logged and self.sim.races.watching:
            args, kwargs = self._watch(op, func, gpu, args, kwargs)
        if op.random and kwargs.get("generator") is None:
            out = self._with_random_state(gpu, func, args, kwargs)
        else:
            out = func(*args, **kwargs)
        outputs = tensors_in(out if isinstance(out, (tuple, list)) else (out,))
        for tensor in outputs:
            place(tensor, gpu)
        if logged:
            stream = _stream_number(gpu)
            self._wrote(op, func, (gpu.index, stream), args, kwargs, outputs)
            read = () if op.factory else tensors
            if op.gathers:
                read = (*tensors[1:], *outputs)
            self.sim.clock.kernel(gpu, stream, func, args, kwargs, read, out)
            if op.sizes:
                self.sim.clock.copy(gpu, None, 8, [stream])
        return out

    def _watch(self, op, func, gpu, args, kwargs):
        """Tell the sanitizer what `func` is about to do; its arguments, as they are.

        A racy read, while races are shown, gets what the memory held before.
        """
        __tracebackhide__ = True
        reads, writes = op.accesses(args, kwargs)
        key = (gpu.index, _stream_number(gpu))
        races = self.sim.races
        racy = races.access(str(func._schema), key, reads, writes)
        old = {id(reads[i][1]): _as_before(*reads[i][1:]) for i in racy}
        if races.way == "show":
            for _, tensor, block in writes:
                races.keep(key, block, functools.partial(_copy_of_bytes, tensor))
        if old:
            args = [_swap(value, old) for value in args]
            kwargs = {name: _swap(value, old) for name, value in kwargs.items()}
        return args, kwargs

    def look_at(self, tensor):
        """A tensor that is printed: as the host sees it, once the stream is there."""
        __tracebackhide__ = True
        gpu, block, races = gpu_of(tensor), block_of(tensor), self.sim.races
        if block is None or not races.watching or tensor.layout is not torch.strided:
            return tensor
        key = (gpu.index, _stream_number(gpu))
        racy = races.access("printing", key, [("self", tensor, block)], [])
        races.host_waits([key])
        if not racy:
            return tensor
        seen = _as_before(tensor, block).clone()
        _storage_of(seen)._simgpu = Allocation(gpu, 0, 0)  # there, but takes no memory
        return seen

    def _wrote(self, op, func, key, args, kwargs, outputs) -> None:
        """`func` has made its outputs, or changed some of its arguments."""
        __tracebackhide__ = True
        races = self.sim.races
        if not races.watching:
            written = outputs
            if op.writes and not op.makes:
                named = zip(op.arguments, args, strict=False)
                values = [value for name, value in named if name in op.writes]
                values += [kwargs[name] for name in op.writes if name in kwargs]
                written = tensors_in(values)
            places = [place for tensor in written for place in _memory_of(tensor)]
            races.remember(func, key, [block for _, block in places])
        elif op.makes:
            made = [("", *place) for tensor in outputs for place in _memory_of(tensor)]
            for _, _, block in made:
                races.keep(key, block, None)
            races.access(str(func._schema), key, [], made, new=True)

    def _with_random_state(self, gpu, func, args, kwargs):
        """Run `func` with the random state of `gpu` in place of the host's."""
        host = torch.default_generator
        with _random_lock:
            before = host.get_state()
            host.set_state(gpu.generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                gpu.generator.set_state(host.get_state())
                host.set_state(before)

    # -- operations with device= -------------------------------------------------------

    def _create(self, op, func, args, kwargs, tensors):
        """Factories: `zeros(..., device=)`, `new_zeros`, `zeros_like`, ..."""
        __tracebackhide__ = True
        device = kwargs.get("device")
        if device is not None and device.type not in ("cuda", "cpu"):
            return func(*args, **kwargs)
        if device is not None and device.type == "cuda":
            gpu = self.sim.find(device)
        elif tensors and (device is None or not self.sim.thread.asked_for_host):
            # nothing asked for, or C++ repeats the device that it sees: the input's
            gpu = self._meet(func, args, tensors)
        else:
            gpu = None if self.sim.thread.asked_for_host else self.sim.thread.born_on
        pin = kwargs.get("pin_memory")
        if gpu is not None or pin:
            kwargs = {**kwargs, "device": _HOST, "pin_memory": False}
        if gpu is not None:
            if pin:
                raise RuntimeError("Only dense CPU tensors can be pinned")
            _refuse_too_large(op, gpu, args, kwargs)
        out = self._run(op, func, args, kwargs, tensors, gpu)
        if gpu is None and pin:
            _storage_of(out)._simgpu_pinned = True
        elif gpu is None and not tensors:
            self._note_birth(out)
        return out

    @_special("_efficientzerotensor")
    def _zero_tensor(self, op, func, args, kwargs, tensors):
        """Zeros without memory crash PyTorch where a mode is active: make real ones."""
        return self._create(op, aten.zeros.default, args, kwargs, tensors)

    # -- C++-born tensors --------------------------------------------------------------

    def _here(self):
        """Names the Python call that is running: same name, same call into C++."""
        frame = sys._getframe(1)
        while frame.f_code.co_filename in _MACHINERY:
            if frame.f_code is _FUNCTION_CODE:
                return (self.sim.thread.calls, "torch function")
            frame = frame.f_back
        if frame.f_code is _BACKWARD_CODE:
            return "backward"
        return (self.sim.thread.calls, id(frame), frame.f_lasti)

    def _note_birth(self, tensor) -> None:
        if not isinstance(tensor, _Tensor) or tensor.layout != torch.strided:
            return
        here = self._here()
        if here == "backward":
            known, gpu = _gpu_of_node(torch._C._current_autograd_node())
            if known:
                place(tensor, gpu)
                return
        _storage_of(tensor)._simgpu_born = here
        self.sim.thread.born = here

    def settle(self, out, args) -> None:
        """C++-born results of a call that is over join the GPU of its inputs."""
        here, self.sim.thread.born = self.sim.thread.born, None
        gpu = next(filter(None, map(gpu_of, tensors_in(args))), None)
        for tensor in tensors_in(out if isinstance(out, (tuple, list)) else (out,)):
            if gpu is not None and gpu_of(tensor) is None and is_plain(tensor):
                if getattr(_storage_of(tensor), "_simgpu_born", None) == here:
                    place(tensor, gpu)

    def _inherit_birth(self, tensors, out) -> None:
        """What C++ computes from a C++-born tensor in the same call is C++-born."""
        if not tensors or self.sim.thread.born != self._here():
            return
        if any(self._is_born_here(tensor) for tensor in tensors):
            for tensor in tensors_in((out,)):
                _storage_of(tensor)._simgpu_born = self.sim.thread.born

    def _is_born_here(self, tensor) -> bool:
        if tensor.layout != torch.strided:
            return False
        born = getattr(_storage_of(tensor), "_simgpu_born", None)
        return born is not None and (born == "backward" or born == self._here())

    # -- special operations ------------------------------------------------------------

    @_special("_to_copy")
    def _to_copy(self, op, func, args, kwargs, tensors):
        """A change of dtype stays; a change of device is a copy over a link."""
        (tensor,), thread = tensors, self.sim.thread
        source, device = gpu_of(tensor), kwargs.get("device")
        asked, thread.moving = thread.moving, False
        if device is None or (device.type == "cpu" and not asked):
            target = source  # C++ passes on the CPU that it sees
        elif device.type in ("cuda", "cpu"):
            target = self.sim.find(device)
        else:
            return func(*args, **kwargs)
        wait = not kwargs.get("non_blocking")
        pin = kwargs.get("pin_memory")
        kwargs = {**kwargs, "device": _HOST, "pin_memory": None, "non_blocking": False}
        if target is source:
            out = self._run(op, func, args, kwargs, tensors, source)
            if source is None and device is not None and not asked:
                self._note_birth(out)  # C++ may mean the GPU of another input
            return out
        # PyTorch takes pinned memory where the host need not wait
        pinned = _is_pinned(tensor) if source is None else not wait
        out = self._cross(
            op, func, args, kwargs, source, target, tensor, pinned=pinned, wait=wait
        )
        if pin or (pinned and target is None):
            _storage_of(out)._simgpu_pinned = True
        return out

    @_special("copy_")
    def _copy(self, op, func, args, kwargs, tensors):
        """`target.copy_(source)` works across devices."""
        target, source = (gpu_of(tensor) for tensor in tensors[:2])
        if target is None and source is not None and self._is_born_here(tensors[0]):
            place(tensors[0], source)
            target = source
        if source is None and target is not None and self._is_born_here(tensors[1]):
            source = target
        if target is source:
            return self._run(op, func, args, kwargs, tensors, target)
        into, tensor = tensors[:2]
        wait = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        pinned = _is_pinned(into if target is None else tensor)
        return self._cross(
            op, func, args, kwargs, source, target, tensor, into=into, pinned=pinned,
            wait=wait,
        )  # fmt: skip

    def _cross(self, op, func, args, kwargs, source, target, tensor, *, pinned, wait,
               into=None):  # fmt: skip
        """Run a copy of `tensor` to another device, `into` a tensor or a new one."""
        __tracebackhide__ = True
        if self.sim.thread.quiet:
            return place(func(*args, **kwargs), target)
        ends = [gpu for gpu in (source, target) if gpu is not None]
        keys = [(gpu.index, _stream_number(gpu)) for gpu in ends]
        races, changed = self.sim.races, into is not None and target is not None
        races.meet(keys)
        if races.watching:
            reads, writes = (
                [("", *place) for place in _memory_of(t)] if there else []
                for t, there in ((tensor, source), (into, changed))
            )
            if races.access(str(func._schema), keys[0], reads, writes):
                old = {id(tensor): _as_before(*reads[0][1:])}
                args = [_swap(value, old) for value in args]
            if writes and races.way == "show":
                copy = functools.partial(_copy_of_bytes, into)
                races.keep(keys[-1], writes[0][2], copy)
        out = place(func(*args, **kwargs), target)
        if target is not None:
            self._wrote(op, func, keys[-1], args, kwargs, [out])
        nbytes = tensor.numel() * tensor.element_size()
        streams = [number for _, number in keys]
        self.sim.clock.copy(source, target, nbytes, streams, pinned, wait)
        return out

    @_special("_local_scalar_dense", "is_nonzero", "equal", "allclose")
    def _read_back(self, op, func, args, kwargs, tensors):
        """`.item()` and its like: a copy to the host, which waits for it."""
        __tracebackhide__ = True
        gpu = self._meet(func, args, tensors)
        logged = gpu is not None and not self.sim.thread.quiet
        if logged and self.sim.races.watching:
            args, kwargs = self._watch(op, func, gpu, args, kwargs)
        out = func(*args, **kwargs)
        if logged:
            nbytes = 1 if isinstance(out, bool) else tensors[0].element_size()
            self.sim.clock.copy(gpu, None, nbytes, [_stream_number(gpu)])
        return out

    @_special("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
    def _index(self, op, func, args, kwargs, tensors):
        """Indices may be on the host; the rest must agree."""
        gpu = gpu_of(tensors[0])
        indices = [t for t in args[1] if t is not None]
        for index in indices:
            its = gpu_of(index)
            if its is not None and its is not gpu:
                raise RuntimeError(
                    "indices should be either on cpu or on the same device as the "
                    f"indexed tensor ({gpu.device if gpu else 'cpu'})"
                )
        for index in indices:
            if gpu is not None and gpu_of(index) is None:
                if not self._is_born_here(index):
                    self.sim.log_copy(None, gpu, index.numel() * index.element_size())
        others = [t for t in tensors if not any(t is index for index in indices)]
        self._meet(func, args, others)
        masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
        if gpu is not None and masks:  # how many it selects, the host must know
            self.sim.log_copy(gpu, None, 8)
        return self._run(op, func, args, kwargs, tensors, gpu)

    @_special("_pack_padded_sequence")
    def _pack(self, op, func, args, kwargs, tensors):
        """Lengths and batch sizes stay on the host, as on CUDA."""
        gpu = gpu_of(tensors[0])
        if gpu_of(tensors[1]) is not None:
            raise RuntimeError(
                "'lengths' argument should be a 1D CPU int64 tensor, but got "
                f"{tensors[1].dim()}D {gpu_of(tensors[1]).device} "
                f"{str(tensors[1].dtype).removeprefix('torch.').title()} tensor"
            )
        data, batch_sizes = func(*args, **kwargs)
        place(data, gpu)
        if not self.sim.thread.quiet and gpu is not None:
            stream = _stream_number(gpu)
            self._wrote(op, func, (gpu.index, stream), args, kwargs, [data])
            self.sim.clock.kernel(gpu, stream, func, args, kwargs, tensors[:1], data)
        return data, batch_sizes

    def _decompose(self, op, func, args, kwargs, tensors):
        """Inference mode sends composite operations whole: see their parts."""
        with self, _seeing(_CONJUGATE), _seeing(_NEGATIVE):
            return func._op_dk(_COMPOSITE, *args, **kwargs)

    def _run_python_kernel(self, op, func, args, kwargs, tensors):
        """A custom operation: the simulator must see what its Python code does."""
        with self, _seeing(_CONJUGATE), _seeing(_NEGATIVE):
            return func.redispatch(_CPU_KERNEL, *args, **kwargs)

    @_special("is_pinned")
    def _pinned(self, op, func, args, kwargs, tensors):
        return _is_pinned(tensors[0])

    @_special("_pin_memory")
    def _pin(self, op, func, args, kwargs, tensors):
        out = tensors[0].clone()
        _storage_of(out)._simgpu_pinned = True
        if not self.sim.thread.quiet:
            self.sim.clock.pin(out.numel() * out.element_size())
        return out

    @_special("_linalg_check_errors")
    def _check_errors(self, op, func, args, kwargs, tensors):
        """The host reads whether it went well, and so waits."""
        gpu = gpu_of(tensors[0])
        if gpu is not None:
            self.sim.log_copy(gpu, None, 4 * tensors[0].numel())
        return func(*args, **kwargs)

    @_special("record_stream")
    def _record_stream(self, op, func, args, kwargs, tensors):
        raise NotSimulated("record_stream called from C++")


def _is_pinned(tensor) -> bool:
    return getattr(_storage_of(tensor), "_simgpu_pinned", False)


def _copy_of_bytes(tensor) -> torch.Tensor:
    """What the memory of a tensor holds, all of it, as a host tensor."""
    with torch._C.DisableTorchFunction():
        return torch.empty(0, dtype=torch.uint8).set_(_storage_of(tensor)).clone()


def _as_before(tensor, block) -> torch.Tensor:
    """What a tensor would be if its memory still held what it did before."""
    with torch._C.DisableTorchFunction():
        before = block.before
        if before is None:  # fresh memory: zeros, as CUDA's mostly is
            before = torch.zeros(_storage_of(tensor).nbytes(), dtype=torch.uint8)
        where = (tensor.storage_offset(), tensor.shape, tensor.stride())
        seen = torch.empty(0, dtype=tensor.dtype).set_(_storage_of(before), *where)
        seen = torch._conj(seen) if tensor.is_conj() else seen
        return torch._neg_view(seen) if tensor.is_neg() else seen


def _swap(value, other: dict):
    """`value`, with the tensors in it for which `other` has another by their id."""
    if isinstance(value, (list, tuple)):
        return [_swap(item, other) for item in value]
    return other.get(id(value), value)


def _gpu_of_node(node) -> tuple[bool, Gpu | None]:
    """Whether it can be known where a backward node works, and where.

    A node's gradients live where its inputs do, and the way back along the graph
    ends at tensors whose GPU is known. A CPU scalar may join any operation, so it
    decides only where nothing else does.
    """
    if node is None or isinstance(node, BackwardCFunction):
        return False, None  # Python code: `tensor_api` looks after its gradients
    scalar, seen, queue = False, {node}, deque([node])
    while queue:
        for following, index in queue.popleft().next_functions:
            places = getattr(following, "_simgpu_outputs", None)
            leaf = getattr(following, "variable", None)
            if places is not None:
                return True, places[index]
            if leaf is None:
                if following is not None and following not in seen:
                    seen.add(following)
                    queue.append(following)
            elif leaf.dim() or gpu_of(leaf):
                return True, gpu_of(leaf)
            else:
                scalar = True
    return scalar, None


def gpu_of_backward() -> Gpu | None:
    """The GPU on which the backward node that runs in this thread works."""
    node = torch._C._current_autograd_node()
    if node is None or node is running.thread.chosen_in:
        return None
    if isinstance(node, BackwardCFunction):
        return next(filter(None, getattr(node, "_simgpu_outputs", ())), None)
    return _gpu_of_node(node)[1]


class _Foreach:
    """`torch._foreach_*` takes lists; each position may be on its own device."""

    def __call__(self, mode, op, func, args, kwargs, tensors):
        gpus = {gpu_of(tensor) for tensor in tensors}
        if len(gpus) == 1:
            return mode._run(op, func, args, kwargs, tensors, gpus.pop())
        if op.name == "_foreach_copy_":  # the one that may cross devices
            for target, source in zip(args[0], args[1], strict=True):
                target.copy_(source)
            return None
        lists = [a for a in args if isinstance(a, (list, tuple)) and tensors_in((a,))]
        results = []
        for i in range(len(lists[0])):
            single = [[a[i]] if _is_parallel(a, lists[0]) else a for a in args]
            mine = tensors_in(single)
            gpu = mode._meet(func, single, mine)
            out = mode._run(op, func, single, kwargs, mine, gpu)
            results += out if isinstance(out, (list, tuple)) else []
        return results or None


def _is_parallel(value, model) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == len(model)


for _name in dir(aten):
    if _name.startswith(("_foreach_", "_fused_")):
        special[_name] = _Foreach()


# -- PyTorch's words -------------------------------------------------------------------


@functools.cache
def _declarations() -> dict[str, str]:
    """Operation and overload -> its entry in PyTorch's native_functions.yaml.

    The file says how each CUDA operation checks its devices. It is read only when a
    program mixes devices.
    """
    import torchgen

    folder = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"
    text = (folder / "native_functions.yaml").read_text(encoding="utf-8")
    return {
        entry[: entry.index("(")].strip(): entry
        for entry in re.split(r"^- func: ", text, flags=re.MULTILINE)[1:]
    }


def _declaration(func) -> str:
    return _declarations().get(
        func._schema.name.removeprefix("aten::")
        + (f".{func._schema.overload_name}" if func._schema.overload_name else ""),
        "",
    )


@functools.cache
def _joins_scalars(func) -> bool:
    """Whether CUDA lets a CPU tensor without dimensions join this operation."""
    return "NoCheck" in _declaration(func) or torch.Tag.pointwise in func.tags


# operations that CUDA runs as another one: name -> (that one, argument -> argument)
_RUNS_AS = {
    "embedding": ("_index_select", {"indices": "index"}),
}
_LEGACY = {
    torch.float32: "FloatTensor", torch.float64: "DoubleTensor",
    torch.float16: "HalfTensor", torch.bfloat16: "BFloat16Tensor",
    torch.int64: "LongTensor", torch.int32: "IntTensor", torch.int16: "ShortTensor",
    torch.int8: "CharTensor", torch.uint8: "ByteTensor", torch.bool: "BoolTensor",
}  # fmt: skip


def type_name(tensor) -> str:
    """What `tensor.type()` says: "torch.cuda.FloatTensor"."""
    package = "torch.cuda." if gpu_of(tensor) else "torch."
    return package + _LEGACY.get(tensor.dtype, str(tensor.dtype))


def _mismatch(func, args, tensors, gpus) -> str:
    """What CUDA says when `func` gets tensors of several devices."""
    name = func._schema.name.removeprefix("aten::")
    devices = [gpu.device if gpu else _HOST for gpu in gpus]
    if name == "convolution" and None in gpus:
        return (
            f"Input type ({type_name(tensors[0])}) and weight type "
            f"({type_name(tensors[1])}) should be the same"
        )
    if name.startswith("masked_fill"):
        return (
            "expected self and mask to be on the same device, but got mask on "
            f"{devices[1]} and self on {devices[0]}"
        )
    if name == "where" and len(devices) == 3:
        return (
            "Expected condition, x and y to be on the same device, but condition is "
            f"on {devices[0]} and x and y are on {devices[1]} and {devices[2]} "
            "respectively"
        )
    if "rnn" in name or "lstm" in name or "gru" in name:
        return (
            "Input and parameter tensors are not at the same device, found input "
            f"tensor at {devices[0]} and parameter tensor at {devices[1]}"
        )
    entry = _declaration(func)
    structured = "structured" in entry
    known = structured or "CUDA" in entry or name in _RUNS_AS
    if _joins_scalars(func) or not known:
        first = next(d for d in devices if d.type == "cuda")
        other = next(d for d in devices if d != first)
        return (
            "Expected all tensors to be on the same device, but found at least two "
            f"devices, {first} and {other}!"
        )
    run_as, renamed = _RUNS_AS.get(name, (None, {}))
    if run_as is None:
        overload = func._schema.overload_name
        run_as = f"{overload}_{name}"
        if structured:
            run_as = f"{name}_{overload}" if overload else name
    position = next(i for i, device in enumerate(devices) if device != devices[0])
    argument = _argument_name(func, args, tensors[position])
    return (
        "Expected all tensors to be on the same device, but got "
        f"{renamed.get(argument, argument)} is on {devices[position]}, different from "
        f"other tensors on {devices[0]} (when checking argument in method "
        f"wrapper_CUDA_{run_as})"
    )


def _argument_name(func, args, tensor) -> str:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if any(tensor is item for item in tensors_in((value,))):
            return argument.name
    return "self"


_sent_home = weakref.WeakSet()  # CPU scalars whose gradient is brought back


def _send_gradient_home(scalar) -> None:
    """A CPU scalar that joined a GPU operation gets its gradient on the CPU."""
    if scalar.requires_grad and scalar not in _sent_home:
        _sent_home.add(scalar)
        scalar.register_hook(lambda gradient: gradient.cpu())


def _check_generator(generator, gpu: Gpu | None) -> None:
    if generator is None:
        return
    kind = gpu_generators.get(generator._cdata, generator).device.type
    wanted = "cuda" if gpu else "cpu"
    if kind != wanted:
        raise RuntimeError(
            f"Expected a '{wanted}' device type for generator but found '{kind}'"
        )


def _refuse_too_large(op, gpu: Gpu, args, kwargs) -> None:
    """Raise OutOfMemoryError before the host fills its own memory with zeros."""
    __tracebackhide__ = True
    size = args[0] if args and isinstance(args[0], (list, tuple, torch.Size)) else ()
    if op.name == "empty_strided" or kwargs.get("layout") not in (None, torch.strided):
        return
    if size and all(isinstance(n, int) for n in size):
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        if op.name == "full" and kwargs.get("dtype") is None:
            whole = {bool: torch.bool, int: torch.int64}
            dtype = whole.get(type(args[1]), dtype)
        count = functools.reduce(lambda a, b: a * b, size, 1)
        gpu.memory.check_room(count * dtype.itemsize, _stream_number(gpu))


# -- torch functions -------------------------------------------------------------------


class Functions(TorchFunctionMode):
    """Sees every torch function before PyTorch reads its arguments.

    Only for what the dispatch mode never gets to see: whole numbers as devices, and
    functions such as `torch.tensor` that build their result in C++ at once.
    """

    def __init__(self, sim, handlers: dict):
        super().__init__()
        self.sim = sim
        self.handlers = handlers

    def __torch_function__(self, func, types, args=(), kwargs=None):
        __tracebackhide__ = True  # notebooks then show the learner's lines only
        if self.sim is not running:  # this thread has outlived its simulator
            if running is None:
                return func(*args, **(kwargs or {}))
            self.sim = running
        thread = self.sim.thread
        thread.calls += 1
        handler = self.handlers.get(func)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        device = kwargs.get("device") if kwargs else None
        if device is not None and isinstance(kwargs.get("out"), _Tensor):
            kwargs = _without_device(kwargs, self.sim)
            device = None
        if device is None:
            call = (thread.calls, "torch function")
            out = func(*args, **kwargs) if kwargs else func(*args)
            if thread.born == call and func is not _HAS_HOST_RESULT:
                self.sim.modes[1].settle(out, args)
            return out
        if type(device) is int:
            kwargs = {**kwargs, "device": self.sim.find(device).device}
        thread.asked_for_host = str(device) == "cpu"
        try:
            return func(*args, **kwargs)
        finally:
            thread.asked_for_host = False


def _without_device(kwargs, sim) -> dict:
    """PyTorch compares `device=` with `out=`, and does not know our devices."""
    device, its = kwargs["device"], gpu_of(kwargs["out"])
    if not isinstance(device, torch.device):
        device = (
            torch.device("cuda", device)
            if type(device) is int
            else (torch.device(device))
        )
    if device.type in ("cuda", "cpu") and sim.find(device) is not its:
        raise RuntimeError(
            f"device {device} does not match device of out parameter "
            f"({kwargs['out'].device})"
        )
    return {name: value for name, value in kwargs.items() if name != "device"}


_HAS_HOST_RESULT = torch._VF._pad_packed_sequence  # its lengths are on the host
_FUNCTION_CODE = Functions.__torch_function__.__code__
_BACKWARD_CODE = torch.autograd.graph._engine_run_backward.__code__
