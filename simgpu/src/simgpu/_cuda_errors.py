"""What `torch.AcceleratorError` says when CUDA refuses."""

import os

from simgpu._compat import is_torch

_MORE = (
    "Search for `{}' in https://docs.nvidia.com/cuda/cuda-runtime-api/"
    "group__CUDART__TYPES.html for more information."
)
_HELP = {"cudaErrorInvalidDevice": "GPU device may be out of range, do you have "
                                   "enough GPUs?"}  # fmt: skip


def words_of_cuda(what: str, name: str) -> str:
    """The message of `torch.AcceleratorError`, as `c10/cuda/CUDAException.cpp` has it.

    Since PyTorch 2.13, only what a kernel has done is said to come late.

    Args:
        what: "out of memory".
        name: of CUDA's error: "cudaErrorMemoryAllocation".
    """
    lines = [f"CUDA error: {what}", _HELP.get(name) or _MORE.format(name)]
    if is_torch((2, 13)) and name != "cudaErrorAssert":
        lines += ["For more detailed error information, run with CUDA_LOG_FILE=stderr"]
    elif os.environ.get("CUDA_LAUNCH_BLOCKING") != "1":
        lines += [
            "CUDA kernel errors might be asynchronously reported at some other API "
            "call, so the stacktrace below might be incorrect.",
            "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
        ]
    lines += ["Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.", ""]
    return "\n".join(lines)
