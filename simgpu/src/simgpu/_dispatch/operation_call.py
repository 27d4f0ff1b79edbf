"""One operation on its way through the simulator: `a + b` read from top to bottom.

`Call.run_on(gpu)` is the usual way: the CPU computes the values, the results are marked
as living on the GPU, the clock notes the work, and the stream sanitizer hears of it.
"""

import contextlib

import torch

from simgpu._device.gpu import Gpu
from simgpu._dispatch import cpp_tensors, device_asserts, random_numbers, sanitizing
from simgpu._dispatch.cuda_kernels import compute_as_cuda
from simgpu._dispatch.errors import mismatch
from simgpu._dispatch.kernel_work import work_of
from simgpu._dispatch.operation import Operation, handles
from simgpu._dispatch.placement import (
    gpus_of,
    no_torch_function,
    place_all,
    tensors_in,
)
from simgpu._dispatch.scalars import joining, send_gradient_back

_NOTHING = contextlib.nullcontext()
_Tensor = torch.Tensor


class Call:
    """An operation with its arguments.

    Attributes:
        runtime: of the simulator.
        operation: what is known of it.
        func: what computes it on the CPU.
        args: its arguments.
        kwargs: its keyword arguments.
        tensors: those among the arguments, also inside lists.
        gpus: on which each of them lives; None is the host.
    """

    __slots__ = ("runtime", "operation", "func", "args", "kwargs", "tensors", "gpus")
    is_captured = False  # it is noted for a CUDA graph and does not run now

    def __init__(self, runtime, operation: Operation, func, args, kwargs):
        self.runtime = runtime
        self.operation = operation
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.tensors = tensors_in(args)
        if kwargs:
            self.tensors += tensors_in(kwargs.values())
        self.gpus = gpus_of(self.tensors)

    def with_tensors(self, tensors: list[torch.Tensor]) -> "Call":
        """A copy of this call whose devices are those of other tensors."""
        other = type(self)(self.runtime, self.operation, self.func, (), {})
        other.args, other.kwargs, other.tensors = self.args, self.kwargs, tensors
        other.gpus = gpus_of(tensors)
        return other

    def common_gpu(self) -> Gpu | None:
        """The GPU of all its tensors; None if they are on the host.

        Raises:
            RuntimeError: if they are on several devices, in PyTorch's words.
        """
        __tracebackhide__ = True
        gpus = self.gpus
        if not gpus:
            return None
        first = gpus[0]
        for gpu in gpus:
            if gpu is not first:
                return self._join_devices()
        return first

    def _join_devices(self) -> Gpu:
        """Tensors on several devices: let those join that may, or refuse."""
        __tracebackhide__ = True
        gpu = next(gpu for gpu in self.gpus if gpu is not None)
        self.adopt(gpu)
        others = [
            tensor
            for tensor, its in zip(self.tensors, self.gpus, strict=True)
            if its is not gpu and (its is not None or tensor.device.type != "meta")
        ]
        scalars = joining(self) if others else []
        if any(all(other is not s for s in scalars) for other in others):
            raise RuntimeError(mismatch(self, self.gpus))
        for scalar in scalars:
            send_gradient_back(self.runtime, scalar)
        return gpu

    def adopt(self, gpu: Gpu) -> None:
        """What C++ made by itself in the call that is running, it meant for `gpu`."""
        for i, (tensor, its) in enumerate(zip(self.tensors, self.gpus, strict=True)):
            if its is None and tensor.device.type != "meta":
                if cpp_tensors.is_of_this_call(self.runtime, tensor):
                    cpp_tensors.place_made(tensor, gpu)
                    self.gpus[i] = gpu

    def is_work_of(self, gpu: Gpu) -> None:
        """It will run on `gpu`; a kind of call may want to know."""

    def run_on(self, gpu: Gpu | None):
        """Compute it on the CPU as if on `gpu`; returns its result."""
        __tracebackhide__ = True
        with no_torch_function():  # in backward our function mode is active, too
            return self._run_on_host() if gpu is None else self._run_on_gpu(gpu)

    def _run_on_gpu(self, gpu: Gpu):
        __tracebackhide__ = True
        logged = self.is_logged()
        if logged and self.runtime.sanitizer.watching:
            sanitizing.before_kernel(self, gpu)
        out = self.compute_on(gpu)
        outputs = [out] if isinstance(out, _Tensor) else tensors_in(_as_list(out))
        blocks = place_all(outputs, gpu)
        if self.operation.take_memory is not None and gpu.workspaces is not None:
            self.operation.take_memory(self, gpu, outputs)
        if logged:
            self.log(gpu, out, outputs, blocks)
        return out

    def compute_on(self, gpu: Gpu):
        """Its values, as work of `gpu`."""
        __tracebackhide__ = True
        if self.operation.random:
            return self._draw(gpu)
        try:
            return self.func(*self.args, **self.kwargs)
        except NotImplementedError as error:
            return compute_as_cuda(self, error)

    def computed(self, func, *args):
        """What another operation makes on the host, in the course of this one."""
        return func(*args)

    def _run_on_host(self):
        if self.operation.random:
            random_numbers.check_generator(self.runtime, self.generator, None)
        with self.runtime.random_lock if self.operation.random else _NOTHING:
            out = self.func(*self.args, **self.kwargs)
        if self.runtime.thread.cpp_call is not None:
            cpp_tensors.pass_on(self.runtime, self.tensors, out)
        return out

    def _draw(self, gpu: Gpu):
        """Compute it with the random numbers of `gpu`, or of the given generator."""
        random_numbers.check_generator(self.runtime, self.generator, gpu)
        return random_numbers.draw(self, self.generator_on(gpu))

    def generator_on(self, gpu: Gpu):
        """What it draws from on `gpu`."""
        given = self.generator
        if given is not None:  # C++ hands on its own, not Python's
            given = self.runtime.gpu_generators.get(given._cdata)
        return given or gpu.generator

    def read_values(self) -> None:
        """The host is about to read values of a GPU; a kind of call may refuse."""
        __tracebackhide__ = True
        if self.runtime.failed:
            device_asserts.check(self.runtime.failed, [g.index for g in self.gpus if g])

    @property
    def generator(self) -> torch.Generator | None:
        """What the program asked its random numbers of."""
        return self.kwargs.get("generator")

    def is_logged(self) -> bool:
        """Whether it counts as work: views do not, nor what printing does."""
        return not self.operation.silent and not self.runtime.thread.unlogged

    def log(self, gpu: Gpu, out, outputs: list, blocks: list) -> None:
        """Tell the sanitizer and the clock that `gpu` has done it.

        Args:
            gpu: where it ran.
            out: its result.
            outputs: the tensors in it.
            blocks: of these.
        """
        __tracebackhide__ = True
        clock, stream = self.runtime.clock, self.runtime.stream_of(gpu)
        sanitizing.after_kernel(self, (gpu.index, stream), outputs, blocks)
        clock.kernel(gpu, stream, self.operation.name, work_of(self, out, outputs))
        if self.operation.size_is_read_back:
            clock.copy(gpu, None, 8, [stream])

    # -- arguments by name -------------------------------------------------------------

    def argument(self, position: int, name: str):
        """An argument, wherever it was given; None if it was left out."""
        if len(self.args) > position:
            return self.args[position]
        return self.kwargs.get(name)

    def named_arguments(self) -> list[tuple]:
        """(argument of the schema, value), in the order of the schema."""
        arguments = self.operation.arguments
        named = list(zip(arguments.values(), self.args, strict=False))
        return named + [(arguments[name], v) for name, v in self.kwargs.items()]


def _as_list(out) -> tuple | list:
    """The results of an operation: several, one, or none."""
    return out if isinstance(out, (tuple, list)) else (out,)


@handles("usual")
def run_on_common_gpu(call: Call):
    """The usual way: where its tensors are."""
    __tracebackhide__ = True
    return call.run_on(call.common_gpu())
