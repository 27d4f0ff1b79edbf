"""An operation while a CUDA graph is captured: computed once, and kept for replays.

On a card nothing runs in a capture. Here the CPU computes each operation all the same,
since the next one needs its shape; what was in memory before is put back at the end.
"""

from simgpu import _runtime as state
from simgpu._dispatch.device_asserts import harmless, is_found_by_kernel
from simgpu._dispatch.named_devices import gpu_named
from simgpu._dispatch.watched_call import WatchedCall


class CapturedCall(WatchedCall):
    """A call, while some stream is captured; whether its own is, it looks itself."""

    __slots__ = ("_gpu", "_is_running", "_draw_of")

    def __init__(self, runtime, operation, func, args, kwargs):
        self._gpu, self._is_running, self._draw_of = None, False, None
        super().__init__(runtime, operation, func, args, kwargs)

    @property
    def capture(self):
        """That of the stream on which it runs; None if it has none."""
        if self._gpu is None:
            return None
        key = self._gpu.index, self.runtime.stream_of(self._gpu)
        return self.runtime.clock.captures.get(key)

    @property
    def is_captured(self) -> bool:
        return self.capture is not None

    def is_work_of(self, gpu) -> None:
        self._gpu = gpu

    def _run_on_gpu(self, gpu):
        __tracebackhide__ = True
        self._gpu = gpu
        capture = self.capture
        if capture is not None:
            capture.check()
        return super()._run_on_gpu(gpu)

    def _draw(self, gpu):
        __tracebackhide__ = True
        if (capture := self.capture) is not None:
            generator = self.generator_on(gpu)
            begun = capture.steps.offset_of(generator)
            own = self.generator is not None
            self._draw_of = generator, generator.offset - begun, own
        return super()._draw(gpu)

    def execute(self, func, args, kwargs):
        """Compute it, and keep how if it is captured."""
        __tracebackhide__ = True
        capture = None if self._is_running else self.capture
        if capture is None:
            return func(*args, **kwargs)
        self._is_running = True
        try:
            return capture.steps.run(
                self.operation, func, args, kwargs, self._draw_of, self._compute
            )
        finally:
            self._is_running = False

    def _compute(self, func, args, kwargs):
        """Compute it; values that only a kernel would refuse are none yet."""
        __tracebackhide__ = True
        name = self.operation.name
        try:
            return func(*args, **kwargs)
        except (IndexError, RuntimeError) as error:
            if not is_found_by_kernel(name, error):
                raise
        if name == "_assert_async":
            return None
        args, kwargs = harmless(name, args, kwargs)
        return func(*args, **kwargs)


def current_capture():
    """The capture of the current stream; None if it has none."""
    runtime = state.running
    captures = None if runtime is None else getattr(runtime.clock, "captures", None)
    if not captures:
        return None
    gpu = gpu_named()
    return captures.get((gpu.index, runtime.stream_of(gpu)))
