"""A tensor's memory: addresses, pinning, sharing, and the ways out of PyTorch."""

import torch

from simgpu._dispatch import placement
from simgpu._dispatch.errors import name_in_errors
from simgpu._dispatch.host_memory import read_by_host
from simgpu._dispatch.placement import block_of, gpu_of, is_plain, memory_of
from simgpu._errors import NotSimulated
from simgpu._fusing import regions

_raw_numpy = torch.Tensor.numpy
_raw_tolist = torch.Tensor.tolist
_raw_reduce_ex = torch.Tensor.__reduce_ex__
_raw_dlpack = torch.Tensor.__dlpack__
_raw_dlpack_device = torch.Tensor.__dlpack_device__
_raw_data_ptr = torch.Tensor.data_ptr
_raw_share_memory = torch.Tensor.share_memory_
_raw_is_shared = torch.Tensor.is_shared
_raw_to_dlpack = torch.utils.dlpack.to_dlpack


def numpy(self, *, force=False):
    gpu = gpu_of(self)
    if gpu is None:
        read_by_host(self, "numpy")
        return _raw_numpy(self, force=force)
    if force:
        host = self.detach().cpu()
        read_by_host(host, "numpy")
        return _raw_numpy(host, force=True)
    raise TypeError(
        f"can't convert {gpu.device} device type tensor to numpy. Use Tensor.cpu() to "
        "copy the tensor to host memory first."
    )


def tolist(self):
    if gpu_of(self) is not None:
        self = self.detach().cpu()
    read_by_host(self, "tolist")
    return _raw_tolist(self)


def reduce_ex(self, protocol):
    """`torch.save` and `pickle` read a tensor's whole storage."""
    read_by_host(self, "pickle", whole=True)
    return _raw_reduce_ex(self, protocol)


def dlpack(self, *args, **kwargs):
    if gpu_of(self) is not None:
        raise NotSimulated("DLPack of a GPU tensor")
    read_by_host(self, "__dlpack__")
    return _raw_dlpack(self, *args, **kwargs)


def dlpack_device(self):
    if gpu_of(self) is not None:
        raise NotSimulated("DLPack of a GPU tensor")
    return _raw_dlpack_device(self)


def cuda_array_interface(self):
    raise AttributeError(
        "__cuda_array_interface__: a simulated GPU tensor has no CUDA memory to share"
    )


def pin_memory(self, device=None):
    if gpu_of(self) is not None:
        raise RuntimeError(
            f"cannot pin '{name_in_errors(self)}' only dense CPU tensors can be pinned"
        )
    if self.is_pinned():
        return self
    return torch.ops.aten._pin_memory(self)


def is_pinned(self, device=None):
    return is_plain(self) and gpu_of(self) is None and placement.is_pinned(self)


def record_stream(self, stream):
    """Once freed, the tensor's block waits for what `stream` was given until then."""
    regions.in_memory(memory_of(self))
    gpu, block = gpu_of(self), block_of(self)
    if gpu is None:
        raise NotImplementedError(
            "Could not run 'aten::record_stream' with arguments from the 'CPU' backend."
        )
    if block is not None:
        gpu.memory.record_stream(block, stream.device_index, stream.stream_id)


def data_ptr(self):
    """The simulated address of a GPU tensor: memory that is reused has the same."""
    regions.in_memory(memory_of(self))
    block = block_of(self)
    if block is None:
        return _raw_data_ptr(self)
    return block.address + self.storage_offset() * self.element_size()


def share_memory_(self):
    return self if gpu_of(self) is not None else _raw_share_memory(self)


def is_shared(self):
    return gpu_of(self) is not None or _raw_is_shared(self)


def to_dlpack(tensor):
    """torch.utils.dlpack.to_dlpack"""
    if gpu_of(tensor) is not None:
        raise NotSimulated("DLPack of a GPU tensor")
    return _raw_to_dlpack(tensor)
