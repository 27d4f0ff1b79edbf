"""Random numbers: `torch.Generator(device="cuda:1")`, seeds and states of each GPU."""

import struct

import torch

from simgpu import _runtime
from simgpu._compat import Generator, is_torch
from simgpu._dispatch.captured_call import current_capture
from simgpu._dispatch.named_devices import find_gpu, gpu_named

_raw_generator = Generator


class _GeneratorMeta(type(_raw_generator)):
    def __instancecheck__(cls, value):
        return isinstance(value, _raw_generator)


_SEED = 67280421310721  # that of a new generator, as in PyTorch


_SEED_STAYS = (
    "CUDAGeneratorImpl::set_current_seed can be called during stream capture only if "
    "new seed is the same as the original seed."
)
_STATES_ARE_FREE = is_torch((2, 13))  # to be read and set in a capture


def _refuse_in_capture(words: str) -> None:
    """Raise what `assertNotCapturing` of PyTorch does, while the stream is captured."""
    if current_capture() is not None:
        raise RuntimeError(
            f"{words} during CUDA graph capture. If you need this call to be captured, "
            "please file an issue. Current cudaStreamCaptureStatus: "
            "cudaStreamCaptureStatusActive"
        )


class _Position:
    """Where a generator of a GPU is; two of them may share it."""

    __slots__ = ("key", "offset")

    def __init__(self):
        self.key, self.offset = _SEED, 0


class Generator(_raw_generator, metaclass=_GeneratorMeta):
    """`torch.Generator(device="cuda:1")`, made of a CPU generator.

    On a GPU its state is CUDA's: a seed and an offset, which each draw moves on.
    """

    gpu = None
    position: _Position  # of a GPU's

    def __new__(cls, device="cpu"):
        device = torch.device(device)
        if device.type not in ("cpu", "cuda"):
            return _raw_generator(device)
        gpu = find_gpu(device)
        return _raw_generator.__new__(cls, "cpu") if gpu is None else new_generator(gpu)

    @property
    def device(self):
        return self.gpu.device if self.gpu else torch.device("cpu")

    @property
    def key(self) -> int:
        return self.position.key

    @property
    def offset(self) -> int:
        return self.position.offset

    @offset.setter
    def offset(self, offset: int) -> None:
        self.position.offset = offset

    def manual_seed(self, seed: int) -> "Generator":
        if self.gpu is not None and current_capture() is not None:
            if not _STATES_ARE_FREE:
                _refuse_in_capture("Cannot call CUDAGeneratorImpl::set_current_seed")
            if int(seed) % 2**64 != self.key:
                raise RuntimeError(_SEED_STAYS)
            return self
        if self.gpu is not None:
            self.position.key, self.position.offset = int(seed) % 2**64, 0
        return super().manual_seed(seed)

    def seed(self) -> int:
        if self.gpu is not None:
            _refuse_in_capture("Cannot call CUDAGeneratorImpl::seed")
        self.manual_seed(found := super().seed())
        return found

    def initial_seed(self) -> int:
        return super().initial_seed() if self.gpu is None else self.key

    def get_offset(self) -> int:
        if self.gpu is None:
            return super().get_offset()
        _refuse_in_capture("Cannot call CUDAGeneratorImpl::get_offset")
        return self.offset

    def set_offset(self, offset: int) -> None:
        if self.gpu is None:
            super().set_offset(offset)
            return
        _refuse_in_capture("Cannot call CUDAGeneratorImpl::set_offset")
        if offset % 4:
            raise RuntimeError("offset must be a multiple of 4")
        self.offset = offset

    def get_state(self) -> torch.Tensor:
        """On a GPU 16 bytes: the seed, then the offset."""
        if self.gpu is None:
            return super().get_state()
        if not _STATES_ARE_FREE:
            _refuse_in_capture("Cannot call CUDAGeneratorImpl::current_seed")
        state = struct.pack("<QQ", self.key, self.offset)
        return torch.frombuffer(bytearray(state), dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> "Generator":
        if self.gpu is None:
            return super().set_state(state)
        if state.device.type != "cpu" or state.dtype is not torch.uint8:
            raise TypeError("RNG state must be a torch.ByteTensor")
        if state.numel() != 16:
            raise RuntimeError("RNG state is wrong size")
        found = struct.unpack("<QQ", bytes(state.tolist()))
        self.position.key, self.position.offset = found
        return self

    def clone_state(self) -> "Generator":
        made = Generator() if self.gpu is None else new_generator(self.gpu)
        return made.set_state(self.get_state())

    def graphsafe_get_state(self) -> "Generator":
        """A generator that draws on from the same position, and moves it."""
        if self.gpu is None:
            return super().graphsafe_get_state()
        made = new_generator(self.gpu)
        made.position = self.position
        return made

    def graphsafe_set_state(self, state: "Generator") -> "Generator":
        if self.gpu is None:
            return super().graphsafe_set_state(state)
        self.position = state.position
        return self

    def __reduce__(self):
        return _rebuild_generator, (str(self.device), self.get_state())


def new_generator(gpu, runtime: _runtime.Runtime | None = None) -> Generator:
    """A new generator of a GPU, such as the one it draws from by default."""
    made = _raw_generator.__new__(Generator, "cpu")
    made.gpu = gpu
    made.position = _Position()
    (runtime or _runtime.current()).gpu_generators[made._cdata] = made
    return made


def give_generators(runtime: _runtime.Runtime) -> None:
    """Give each GPU the generator from which it draws by default."""
    for gpu in runtime.gpus:
        gpu.generator = new_generator(gpu, runtime)
    runtime.generators[:] = [gpu.generator for gpu in runtime.gpus]


def _rebuild_generator(device: str, state: torch.Tensor) -> Generator:
    return Generator(device).set_state(state)


def manual_seed(seed: int) -> None:
    gpu_named().generator.manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for gpu in _runtime.current().gpus:
        gpu.generator.manual_seed(int(seed))


def seed() -> None:
    gpu_named().generator.seed()


def seed_all() -> None:
    manual_seed_all(gpu_named().generator.seed())


def initial_seed() -> int:
    return gpu_named().generator.initial_seed()


def _default_generator(device) -> Generator:
    """That of the GPU with this number, which Python looks up among all.

    Raises:
        IndexError: if there is none.
    """
    state = _runtime.current()
    state.initialize()
    index = device if isinstance(device, int) else torch.device(device).index
    if index is None:
        index = gpu_named().index
    generators = tuple(gpu.generator for gpu in state.gpus)
    return generators[index]


def get_rng_state(device="cuda") -> torch.Tensor:
    return _default_generator(device).get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    return [gpu.generator.get_state() for gpu in _runtime.current().gpus]


def set_rng_state(new_state, device="cuda") -> None:
    _default_generator(device).set_state(new_state)


def set_rng_state_all(new_states) -> None:
    for gpu, state in zip(_runtime.current().gpus, new_states, strict=True):
        gpu.generator.set_state(state)
