"""Random numbers of each GPU: the host's generator, with the state of the GPU's own.

Numbers have the right distribution and seeds, but are not those that a real card draws.
"""

import torch


def draw_from(gpu, call):
    """Compute `call` with the random state of `gpu` in place of the host's."""
    host = torch.default_generator
    with call.runtime.random_lock:
        before = host.get_state()
        host.set_state(gpu.generator.get_state())
        try:
            return call.func(*call.args, **call.kwargs)
        finally:
            gpu.generator.set_state(host.get_state())
            host.set_state(before)


def check_generator(runtime, generator, gpu) -> None:
    """Refuse a generator of the wrong kind of device, in PyTorch's words."""
    if generator is None:
        return
    its = runtime.gpu_generators.get(generator._cdata, generator).device.type
    wanted = "cuda" if gpu else "cpu"
    if its != wanted:
        raise RuntimeError(
            f"Expected a '{wanted}' device type for generator but found '{its}'"
        )
