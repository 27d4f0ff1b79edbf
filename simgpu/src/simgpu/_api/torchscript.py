"""TorchScript's files: `torch.jit.save` and `torch.jit.load`.

Models: a module is loaded to where it was saved from, or to `map_location`; where each
parameter and buffer was stands in an extra file of the archive, for C++ writes that all
are on the CPU. Leaves out: constants in the code of a frozen module, which stay on the
CPU. What TorchScript's own code says of devices is in `script_devices.py`.
"""

import json

import torch
from torch.jit import RecursiveScriptModule

from simgpu._api.naming import as_device
from simgpu._api.patch import Patch, patches
from simgpu._dispatch.placement import gpu_of

_FILE = "simgpu_devices.json"
_raw_load = torch.jit.load
_raw_save = RecursiveScriptModule.save
_raw_save_to_buffer = RecursiveScriptModule.save_to_buffer


def _tensors(module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _with_devices(module, files: dict | None) -> dict:
    """The extra files of an archive, and ours."""
    tensors = _tensors(module)
    on_gpu = {name: str(t.device) for name, t in tensors.items() if gpu_of(t)}
    return {**(files or {}), _FILE: json.dumps(on_gpu)}


def save(self, f, _extra_files=None):
    return _raw_save(self, f, _extra_files=_with_devices(self, _extra_files))


def save_to_buffer(self, _extra_files=None):
    return _raw_save_to_buffer(self, _extra_files=_with_devices(self, _extra_files))


def load(f, map_location=None, _extra_files=None, *args, **kwargs):
    """torch.jit.load"""
    files = {} if _extra_files is None else _extra_files
    files[_FILE] = ""
    try:
        module = _raw_load(f, "cpu", files, *args, **kwargs)
    finally:
        saved_from = files.pop(_FILE)
    devices = json.loads(saved_from or "{}")
    target = as_device(map_location)
    for name, tensor in _tensors(module).items():
        device = target or devices.get(name, "cpu")
        tensor.data = tensor.data.to(device)
    return module


def rows() -> list[Patch]:
    """Their part of the table of replacements."""
    return [
        *patches(torch.jit, "C++ knows of no GPU", load=load),
        *patches(RecursiveScriptModule, "C++ knows of no GPU",
                 save=save, save_to_buffer=save_to_buffer),
    ]  # fmt: skip
