"""`torch.backends.cuda` and `.cudnn`: versions, and flags that C++ keeps where CUDA is.

Most flags are kept by PyTorch's own C++ also without CUDA; these are not. Models: that
they are kept. Leaves out: what they would do to a kernel.
"""

import torch

from simgpu._compat import BlasBackend, LinalgBackend
from simgpu._dispatch.named_devices import gpu_named

CUDNN_VERSION = 91900  # 9.19.0, of PyTorch 2.11 for CUDA 13.0
_PLANS = 4096  # most plans that cuFFT's cache of a GPU keeps, unless the program says


class Flags:
    """What the program has chosen, of one runtime."""

    def __init__(self):
        self.blas = BlasBackend.Cublas
        self.linalg = LinalgBackend.Default
        self.benchmark_limit = 10
        self.plans: dict[int, int] = {}  # GPU -> most plans

    def get_blas(self):
        return self.blas

    def set_blas(self, backend) -> None:
        """The default is cuBLAS."""
        names = BlasBackend
        if backend == getattr(names, "Ck", None):
            raise RuntimeError(
                "Cannot set preferred backend to CK if PyTorch has not been compiled "
                "with ROCm."
            )
        self.blas = names.Cublas if backend == names.Default else backend

    def get_linalg(self):
        return self.linalg

    def set_linalg(self, backend) -> None:
        self.linalg = backend

    def get_limit(self) -> int:
        return self.benchmark_limit

    def set_limit(self, limit: int) -> None:
        self.benchmark_limit = limit

    def most_plans(self, index: int) -> int:
        return self.plans.get(gpu_named(index).index, _PLANS)

    def set_most_plans(self, index: int, most: int) -> None:
        if most < 0:
            raise RuntimeError(
                "cuFFT device plan cache size must be non-negative, but got size "
                f"{most}"
            )
        self.plans[gpu_named(index).index] = most

    def c_functions(self) -> dict:
        """Functions of torch._C: name -> function."""
        return {
            "_get_blas_preferred_backend": self.get_blas,
            "_set_blas_preferred_backend": self.set_blas,
            "_get_linalg_preferred_backend": self.get_linalg,
            "_set_linalg_preferred_backend": self.set_linalg,
            "_cuda_get_cudnn_benchmark_limit": self.get_limit,
            "_cuda_set_cudnn_benchmark_limit": self.set_limit,
        }

    def plan_cache_functions(self) -> dict:
        """Functions of torch for cuFFT's cache of plans, which stays empty here."""
        return {
            "_cufft_get_plan_cache_max_size": self.most_plans,
            "_cufft_set_plan_cache_max_size": self.set_most_plans,
            "_cufft_get_plan_cache_size": lambda index: 0,
            "_cufft_clear_plan_cache": lambda index: None,
        }

    def limit_property(self) -> torch.backends.ContextProp:
        """`torch.backends.cudnn.benchmark_limit`."""
        return torch.backends.ContextProp(self.get_limit, self.set_limit)


def cudnn_version() -> int:
    return CUDNN_VERSION
