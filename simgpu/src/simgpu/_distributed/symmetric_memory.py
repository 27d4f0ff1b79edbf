"""Symmetric memory: refused, whichever of its many doors a program takes.

`torch.distributed._symmetric_memory` is not imported for this, since that takes long:
all that it does goes through one class of C++ or an operation of its own.
"""

from collections.abc import Callable

from simgpu._api.refused import refuse
from simgpu._compat import SymmetricMemory, is_absent
from simgpu._dispatch.operation import handles
from simgpu._dispatch.operation_call import Call
from simgpu._errors import NotSimulated

_WHAT = "symmetric memory"
_WHY = "All ranks would map the memory of one another's GPUs; use torch.distributed."
# function of C++ -> what a program calls, in `torch.distributed._symmetric_memory`
_DOORS = {
    "empty_strided_p2p": "empty", "rendezvous": "rendezvous",
    "get_mempool_allocator": "get_mem_pool", "set_backend": "set_backend",
    "get_backend": "get_backend", "set_group_info": "enable_symm_mem_for_group",
    "has_multicast_support": "_SymmetricMemory.has_multicast_support",
    "memset32": "_SymmetricMemory.memset32",
    "stream_write_value32": "_SymmetricMemory.stream_write_value32",
}  # fmt: skip


def doors() -> dict[str, Callable]:
    """What stands for the functions of C++ that this PyTorch has."""
    if is_absent(SymmetricMemory):
        return {}
    known = {name: call for name, call in _DOORS.items()
             if hasattr(SymmetricMemory, name)}  # fmt: skip
    return {
        name: staticmethod(
            refuse(f"{_WHAT} (torch.distributed._symmetric_memory.{call})", _WHY)
        )
        for name, call in known.items()
    }


@handles("symm_mem::")
def run_with_symmetric_memory(call: Call):
    """An operation of symmetric memory."""
    raise NotSimulated(f"{_WHAT} ({call.func._schema.name})", _WHY)
