"""All state of the simulator, in one object: the `Runtime` that `start()` makes.

Every other file looks here for what is running. What belongs to the process and not to
its GPUs is kept elsewhere: HOW-IT-WORKS.md lists it ("State").
"""

import threading
import weakref
from typing import Any

from simgpu._device import ledger, overhead
from simgpu._device.gpu import Gpu
from simgpu._device.host_memory import HostMemory
from simgpu._device.settings import Settings
from simgpu._device.visible import visible_ordinals
from simgpu._device.workspaces import Handles, Workspaces, default_size
from simgpu._request import Request
from simgpu._sanitizer.sanitizer import StreamSanitizer
from simgpu._switch import wanted
from simgpu._timing.clock import Clock

_BAD_FORK = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with "
    "multiprocessing, you must use the 'spawn' start method"
)
running: "Runtime | None" = None  # of this process; set by `start()` and `stop()`


def current() -> "Runtime":
    """The runtime of this process.

    Raises:
        RuntimeError: if no GPUs are simulated.
    """
    if running is None:
        real = "; SIMGPU=off asks for none" if wanted() == "real" else ""
        raise RuntimeError(
            "no simulated GPUs are running; call simgpu.start(4) first" + real
        )
    return running


class ThreadState(threading.local):
    """What is the thread's own."""

    device = 0  # index of the current GPU
    device_chosen_in = None  # the backward node in whose code it was chosen
    streams: dict[int, int]  # GPU -> number of the current stream, if not 0
    stream_changes: list[tuple]  # (number of autograd's next node, current streams)
    function_calls = 0  # torch functions called so far: tells two calls apart
    asked_for_copy = False  # the copy that comes now was asked for by the program
    asked_for_cpu = False  # the factory call that runs now says device="cpu"
    unlogged = 0  # greater than 0: nothing is logged (a tensor is being printed)
    cpp_call = None  # the call in which C++ last made a tensor of its own
    cpp_waits = 0  # greater than 0: C++ waits for the collectives that it launches
    name_of_group = None  # of the process group that is being made, if it is a split
    premultiplier = None  # the factor of a sum that `ReduceOp` has and C++ hides
    script_errors = None  # in a call of TorchScript: the errors of its operations
    deserialized = 0  # values that Python has unpickled for torch.distributed.rpc
    gpu_of_cpp_tensors = None  # the GPU on which such tensors are, where it is known
    cublas_handles: Handles

    def __init__(self):  # in each thread that looks
        self.streams = {}
        self.stream_changes = []
        self.cublas_handles = Handles()


class Runtime:
    """A machine with simulated GPUs.

    Args:
        request: which GPUs.
        honour_visible: whether CUDA_VISIBLE_DEVICES hides some of them.
    """

    def __init__(self, request: Request, honour_visible: bool):
        self.request = request
        self.honour_visible = honour_visible
        self.visible_fixed = False  # the program has looked which GPUs there are
        self.initialized = False  # and has used one
        self.forked = False  # this is a forked child, where CUDA cannot be used
        self.without_values = False  # tensors have shapes alone: `simgpu.estimate`
        self.call_kind: Any = None  # what an operation becomes, if not a `Call`
        self.usual_kind: Any = None  # the same outside of CUDA graphs
        self.fusing: Any = None  # what `torch.compile` fuses, once it was called
        self.peers: Any = None  # what stands for the other ranks, if they do not run
        self.dry: Any = None  # the dry run that this is
        self.thread = ThreadState()

        numbers = range(request.number)
        self.settings = Settings()  # of the allocators
        self.gpus = [
            Gpu(i, request.card, request.total_memory, i, self.settings)
            for i in numbers
        ]
        self.machine = tuple(self.gpus)  # also those that are not visible
        self.sanitizer = StreamSanitizer(request.races)
        # storages of the host that copies use which it has not waited for
        self.unfinished = self.sanitizer.host_copies.unfinished
        self.clock = Clock(self.gpus, self.sanitizer, request.host)
        self.host_memory = HostMemory(self.clock)  # that is pinned
        # address -> bytes of memory that the program has pinned by itself
        self.registered: dict[int, int] = {}
        for gpu in self.gpus:
            gpu.memory.clock = self.clock
            if request.overhead:
                gpu.memory.share.outside["context"] = overhead.CONTEXT
                gpu.workspaces = Workspaces(gpu.memory)

        self.raw_blocks: dict[int, tuple] = {}  # address -> (GPU, block), asked for raw
        self.sync_debug_mode = 0  # of `torch.cuda.set_sync_debug_mode`
        # library -> bytes of a workspace, where the program has set them
        self.blas_workspaces: dict[str, int] = {}

        # random numbers
        self.random_lock = threading.RLock()  # for the host's generator
        self.generators: list = []  # of the GPUs: `torch.cuda.default_generators`
        # address of a generator in C++ -> the Python object that knows its GPU
        self.gpu_generators = weakref.WeakValueDictionary()

        # what is replaced, and the modes of the main thread
        self.patches: Any = None  # `Patches` of a layer above
        self.modes: tuple = ()  # function mode, dispatch mode
        self.functions: dict = {}  # torch function -> what answers it
        # CPU scalars that joined an operation on a GPU: their gradient is sent back
        self.scalars_with_hook = weakref.WeakSet()

        # torch.autocast: kernels that are registered, weights that were cast
        self.autocast_kernels = None
        self.autocast_lock = threading.RLock()
        self.autocast_cache: dict[int, tuple] = {}

        # memory of CUDA graphs, by its address: `Memory` of a layer above
        self.graph_memory = weakref.WeakValueDictionary()

        self.norm_kernels: Any = None  # of RMSNorm, registered for autograd

        # GPU of which a kernel has asserted -> whether the program was told
        self.failed: dict[int, bool] = {}

        self.sharing = None  # what was sent to processes, once something was

        # torch.distributed
        self.cluster = None  # the job, once it has a process group
        self.jobs = 0  # so far
        self.network = None  # between nodes, as `Topology` takes it
        self.communicators: dict[str, object] = {}  # by the name of the process group
        self.flight_recorder: Any = None  # False where nothing is to be recorded
        self.lives: dict[str, int] = {}  # how many groups have had a name
        # kept: the last to let go of a group, where that is the reducer of DDP, waits
        # for gloo's threads with Python's lock in its hand, which they may want
        self.gloo_groups: list = []
        self.awaited_of_gloo: dict = {}  # `Work`s, and whom they wait for
        self.device_maps: dict[str, dict] = {}  # of torch.distributed.rpc, by worker
        self.for_children: dict | None = None  # `start()` of spawned processes
        self.ledger: ledger.Ledger | None = None  # what other processes have in use

    def count(self) -> int:
        """GPUs that the program can see; asking does not initialise CUDA.

        Until that is initialised, NVML answers, which reads the environment each time.
        """
        if self.honour_visible and not self.initialized:
            return len(visible_ordinals(self.request.number))
        return len(self.gpus)

    def fix_visible(self) -> int:
        """How many GPUs there are; from now on the environment is not read again."""
        if not self.visible_fixed:
            self.visible_fixed = True
            if self.honour_visible:
                ordinals = visible_ordinals(self.request.number)
                self.gpus[:] = [self.gpus[n] for n in ordinals]
                self.generators[:] = [gpu.generator for gpu in self.gpus]
                for index, gpu in enumerate(self.gpus):
                    gpu.renumber(index, ordinals[index])
                self.clock.clear()
        return len(self.gpus)

    def initialize(self) -> None:
        """Use CUDA for the first time.

        Raises:
            RuntimeError: in a forked child, and where no GPU is visible.
        """
        self.initialize_in_cpp()
        self.initialized = True

    def initialize_in_cpp(self) -> None:
        """C++ uses CUDA by itself: `torch.cuda.is_initialized()` does not hear of it.

        Raises:
            RuntimeError: in a forked child, and where no GPU is visible.
        """
        if self.forked:
            raise RuntimeError(_BAD_FORK)
        if not self.fix_visible():
            raise RuntimeError("No CUDA GPUs are available")

    def share_cards(self) -> None:
        """From now on the other processes of the machine use the same cards."""
        number, card, total, *_ = self.request
        self.ledger = ledger.join((number, card.name, total))
        if self.ledger is not None:
            for ordinal, gpu in enumerate(self.machine):
                gpu.memory.share.entry = self.ledger.entry(ordinal)

    def leave_cards(self) -> None:
        """This process uses the cards no more."""
        for gpu in self.machine:
            gpu.memory.share.entry = None
        if self.ledger is not None:
            self.ledger.leave()
            self.ledger = None

    def stream_of(self, gpu: Gpu) -> int:
        """The number of this thread's current stream on a GPU."""
        return self.thread.streams.get(gpu.index, 0)

    def workspace_size(self, gpu: Gpu) -> int:
        """Bytes of one of cuBLAS's workspaces."""
        return self.blas_workspaces.get("cublas", default_size(gpu.card))

    def after_fork(self) -> None:
        """In a forked child: what the parent had is not the child's.

        Another thread may have held a lock at that moment; it is not here to free it.
        """
        self.random_lock._at_fork_reinit()
        self.sanitizer.lock._at_fork_reinit()
        self.host_memory.lock._at_fork_reinit()
        self.forked = self.visible_fixed
        if self.ledger is not None:
            self.ledger.after_fork()
            for gpu in self.machine:
                gpu.memory.share.has_context = False
        # their threads are in the parent, and whoever lets go of them waits for these
        self.gloo_groups_of_parent, self.gloo_groups = self.gloo_groups, []
