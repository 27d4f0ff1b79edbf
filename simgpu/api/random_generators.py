"""Random numbers: `torch.Generator(device="cuda:1")`, seeds and states of each GPU."""

import torch

from simgpu import runtime
from simgpu.dispatch.devices import find_gpu, gpu_named

_raw_generator = torch._C.Generator


class _GeneratorMeta(type(_raw_generator)):
    def __instancecheck__(cls, value):
        return isinstance(value, _raw_generator)


class Generator(_raw_generator, metaclass=_GeneratorMeta):
    """`torch.Generator(device="cuda:1")`, made of a CPU generator."""

    gpu = None

    def __new__(cls, device="cpu"):
        device = torch.device(device)
        if device.type not in ("cpu", "cuda"):
            return _raw_generator(device)
        gpu = find_gpu(device)
        return _raw_generator.__new__(cls, "cpu") if gpu is None else new_generator(gpu)

    @property
    def device(self):
        return self.gpu.device if self.gpu else torch.device("cpu")

    def clone_state(self) -> "Generator":
        made = Generator() if self.gpu is None else new_generator(self.gpu)
        return made.set_state(self.get_state())

    def __reduce__(self):
        return _rebuild_generator, (str(self.device), self.get_state())


def new_generator(gpu, now: runtime.Runtime | None = None) -> Generator:
    """A new generator of a GPU, such as the one it draws from by default."""
    made = _raw_generator.__new__(Generator, "cpu")
    made.gpu = gpu
    (now or runtime.current()).gpu_generators[made._cdata] = made
    return made


def give_generators(now: runtime.Runtime) -> None:
    """Give each GPU the generator from which it draws by default."""
    for gpu in now.gpus:
        gpu.generator = new_generator(gpu, now)
    now.generators[:] = [gpu.generator for gpu in now.gpus]


def _rebuild_generator(device: str, state: torch.Tensor) -> Generator:
    return Generator(device).set_state(state)


def manual_seed(seed: int) -> None:
    gpu_named().generator.manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for gpu in runtime.current().gpus:
        gpu.generator.manual_seed(int(seed))


def seed() -> None:
    gpu_named().generator.seed()


def seed_all() -> None:
    manual_seed_all(gpu_named().generator.seed())


def initial_seed() -> int:
    return gpu_named().generator.initial_seed()


def get_rng_state(device="cuda") -> torch.Tensor:
    return gpu_named(device).generator.get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    return [gpu.generator.get_state() for gpu in runtime.current().gpus]


def set_rng_state(new_state, device="cuda") -> None:
    gpu_named(device).generator.set_state(new_state)


def set_rng_state_all(new_states) -> None:
    for gpu, state in zip(runtime.current().gpus, new_states, strict=True):
        gpu.generator.set_state(state)
