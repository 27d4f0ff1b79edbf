"""`torch.utils.cpp_extension.load` with CUDA sources: there is nothing to run them."""

from simgpu._api.patch import Patch, patches
from simgpu._compat import ExtensionVersioner
from simgpu._errors import NotSimulated

_raw_bump_version = ExtensionVersioner.bump_version_if_changed


def bump_version(self, name, *args, with_cuda, **kwargs):
    """What `load` and `load_inline` call before they look for a compiler.

    Raises:
        NotSimulated: where there are CUDA sources.
    """
    if with_cuda:
        raise NotSimulated(f"the CUDA code of the extension {name!r}")
    return _raw_bump_version(self, name, *args, with_cuda=with_cuda, **kwargs)


def rows() -> list[Patch]:
    """Their part of the table of replacements."""
    return patches(
        ExtensionVersioner, "kernels in CUDA C++ cannot run",
        bump_version_if_changed=bump_version,
    )  # fmt: skip
