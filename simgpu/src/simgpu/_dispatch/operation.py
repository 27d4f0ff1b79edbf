"""What is known of an operation of PyTorch: what it reads, writes, makes and costs.

An `Operation` is made once for each overload, mostly from its schema. Operations that
are not run in the usual way have a function of their own, registered with `@handles`.
"""

import sys
from collections.abc import Callable

import torch
from torch.utils.flop_counter import flop_registry

from simgpu._compat import OPDEFS, DispatchKey, has_computed_kernel, has_kernel
from simgpu._dispatch import working_memory
from simgpu._dispatch.cuda_kernels import guarded
from simgpu._dispatch.kernel_work import COUNTED
from simgpu._dispatch.versions import counting
from simgpu._timing.kernel_cost import TRAFFIC

_has_kernel = has_computed_kernel
_COMPOSITE = DispatchKey.CompositeImplicitAutograd
OF_ANY_DEVICE = (
    DispatchKey.CompositeExplicitAutograd,
    DispatchKey.CompositeExplicitAutogradNonFunctional,
)

# what launches nothing on a GPU: views, and memory that nobody fills
_SILENT = {
    "detach", "alias", "empty", "empty_like", "empty_strided", "new_empty",
    "new_empty_strided", "set_", "resize_", "_unsafe_view", "lift_fresh", "lift",
    "_sparse_coo_tensor_with_dims_and_tensors", "_coalesced_", "_reshape_alias",
    "fsdp::record_grad_output_stream",  # a note for devices that are not CUDA
}  # fmt: skip
# they read of their first tensor only what they return
_GATHERS = {"embedding", "index", "index_select", "gather", "take", "_unsafe_index"}
_OVERWRITES = {
    "copy_", "_foreach_copy_", "zero_", "_foreach_zero_", "fill_", "normal_",
    "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_",
    "geometric_",
}  # fmt: skip
# they go to some places of their first tensor, so often
_SCATTERS = {
    "index_copy_": 1, "scatter_": 1, "index_put_": 1, "_index_put_impl_": 1,
    "index_add_": 2, "scatter_add_": 2,
}  # fmt: skip
# they have code for any device, and one kernel on CUDA
_OWN_KERNELS = {"silu_backward", "mish_backward"}

_handlers: dict[str, Callable] = {}  # operation, or "namespace::" -> what runs it
known_operations: dict[object, "Operation"] = {}


def handles(*names: str) -> Callable:
    """The decorated function `run(call)` runs these operations.

    Args:
        names: of operations of aten ("copy_"), others with their namespace, or a whole
            namespace ("c10d::").
    """

    def register(run: Callable) -> Callable:
        _handlers.update(dict.fromkeys(names, run))
        return run

    return register


class Operation:
    """One overload of an operation, such as `aten::add.Tensor`."""

    __slots__ = (
        "func", "name", "arguments", "writes", "makes", "has_device", "random",
        "silent", "is_factory", "gathers", "written", "overwrites", "scatters",
        "dynamic", "size_is_read_back", "take_memory", "flop_formula", "traffic", "run",
        "in_parts", "passes",
    )  # fmt: skip

    def __init__(self, func):
        schema = func._schema
        self.func = func
        self.name = schema.name.removeprefix("aten::").removeprefix("simgpu::")
        self.arguments = {a.name: a for a in schema.arguments}
        self.writes = [a.name for a in schema.arguments if is_written(a)]
        # its results are new tensors, and not its arguments
        self.makes = bool(schema.returns) and not any(
            result.alias_info for result in schema.returns
        )
        self.has_device = "device" in self.arguments
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        view = func.is_view or torch.Tag.inplace_view in func.tags
        self.silent = view or self.name in _SILENT
        # it reads nothing of its tensors but their shapes and the like
        self.is_factory = self.name.startswith("new_") or self.name.endswith("_like")
        self.gathers = self.name in _GATHERS
        # (position, name) of what it writes. Fused optimizers unscale gradients, but
        # only where they are given a scale
        self.written = [
            (i, a.name) for i, a in enumerate(schema.arguments) if is_written(a)
            and not (a.name == "grads" and self.name.startswith("_fused_"))
        ]  # fmt: skip
        # it does not read what it writes
        is_out = any(argument.is_out for argument in schema.arguments)
        self.overwrites = is_out or self.name in _OVERWRITES
        self.scatters = _SCATTERS.get(self.name, 0)
        # what it takes of a GPU's memory beside its results
        self.take_memory = working_memory.TAKES.get(self.name)
        # the shape of its result depends on values, which the host must read before it
        # can go on; that of "index" only if a mask is among its indices
        self.dynamic = torch.Tag.dynamic_output_shape in func.tags
        self.size_is_read_back = self.dynamic and self.name != "index"
        formula = flop_registry.get(func.overloadpacket)
        self.flop_formula = COUNTED.get(self.name, formula)
        self.traffic = TRAFFIC.get(self.name, 1.0)
        handler = self._find_handler(func)
        self.run = counting(self, guarded(func, self.name, handler))
        # the simulator sees the operations that it is made of
        names = ("composite", "python kernel", "copy")
        self.in_parts = handler in [_handlers.get(name) for name in names]
        # views of one tensor, and the profiler's notes: nothing is launched or made
        usual = [_handlers.get(name) for name in ("usual", "of any device")]
        one = [a.type.kind() for a in schema.arguments].count("TensorType") == 1
        self.passes = func.namespace == "profiler" or (
            func.is_view and one and self.run in usual
        )

    def _find_handler(self, func) -> Callable:
        if func.namespace != "aten" and self.name in _handlers:
            return _handlers[self.name]
        namespace = _handlers.get(f"{func.namespace}::")
        if namespace is not None:
            return namespace
        if _has_python_kernel(func):
            return _handlers["python kernel"]
        if self.name in _handlers:
            return _handlers[self.name]
        if func.namespace == "aten" and not _has_kernel(func.name(), "CPU"):
            return _handlers["kernel of CUDA only"]
        if self.name.startswith(("_foreach_", "_fused_")):
            return _handlers["foreach"]
        if has_kernel(func.name(), _COMPOSITE) and self.name not in _OWN_KERNELS:
            return _handlers["composite"]
        if self.has_device:
            return _handlers["factory"]
        of_any_device = any(has_kernel(func.name(), key) for key in OF_ANY_DEVICE)
        if of_any_device and not has_kernel(func.name(), DispatchKey.CPU):
            return _handlers["of any device"]
        return _handlers["usual"]


def operation_of(func) -> Operation:
    """What is known of an operation, looked up once."""
    operation = known_operations.get(func)
    if operation is None:
        operation = known_operations[func] = Operation(func)
    return operation


def is_written(argument) -> bool:
    """Whether an operation changes this argument of its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write


def _has_python_kernel(func) -> bool:
    """Whether `torch.library` registered Python code as this operation's kernel."""
    name = func._schema.name
    space, _, rest = name.partition("::")
    keys = ("CPU", "CUDA", "CompositeExplicitAutograd")
    registered = getattr(torch.library, "_impls", set())
    overload = f".{func._schema.overload_name}" if func._schema.overload_name else ""
    kernels_of_pytorch = _kernels_of_pytorch() if space == "aten" else ()
    return (space != "aten" and name in OPDEFS) or any(
        f"{space}/{rest}{overload}/{key}" in registered
        and (f"{rest}{overload}", key) not in kernels_of_pytorch
        for key in keys
    )


def _kernels_of_pytorch() -> set[tuple[str, str]]:
    """Operations of aten, and the key, for which PyTorch itself has Python code.

    PyTorch 2.13 built for CUDA registers code that picks a Triton kernel of its own for
    `bmm`, where one suits. It calls CUDA's kernel else, which only a real GPU has.
    Since 2.15 it notes the namespace, too: ("aten", "bmm", "CUDA").
    """
    native = sys.modules.get("torch._native.registry")
    return {key[-2:] for key in getattr(native, "_graphs", ())}
