"""An operation that may be a part of compiled code."""

from simgpu._compat import torch_ops
from simgpu._dispatch import sanitizing
from simgpu._dispatch.operation import operation_of
from simgpu._dispatch.operation_call import Call


class FusingCall(Call):
    """A call whose kernel is a fused one where compiled code runs; computed as ever."""

    __slots__ = ("_fusing",)

    def __init__(self, runtime, operation, func, args, kwargs):
        super().__init__(runtime, operation, func, args, kwargs)
        fusing = runtime.fusing
        # what fuses it, if it is a part of compiled code, and no `with_tensors`
        self._fusing = fusing if (args or kwargs) and fusing.takes(self) else None

    def _run_on_gpu(self, gpu):
        __tracebackhide__ = True
        if self._fusing is None:
            return super()._run_on_gpu(gpu)
        asks = getattr(self.func, "asks", None)
        if asks is not None:  # in place only where it is a kernel by itself
            self.func = asks
            if isinstance(asks, torch_ops.OpOverload):
                self.operation = operation_of(asks)
        if self.is_logged() and self.runtime.sanitizer.watching:
            sanitizing.before_kernel(self, gpu)
        out = self.compute_on(gpu)
        self._fusing.run(self, gpu, out)
        return out

    def log(self, gpu, out, outputs, blocks) -> None:
        super().log(gpu, out, outputs, blocks)
        fusing = self.runtime.fusing
        if fusing.is_inside():
            fusing.note_written(outputs or self.tensors[:1])
