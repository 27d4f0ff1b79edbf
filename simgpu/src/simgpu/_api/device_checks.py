"""Functions whose C++ compares devices before its parts run: `torch.lstm`, ...

To C++ all tensors here are the CPU's, so its checks pass, and a part would be refused
in other words, or not at all. Sources: `check_attributes` in RNN.h, the cells of
RNN.cpp, GridSamplerUtils.h, `quantile_checks` in Sorting.cpp, TensorShape.cpp
(`meshgrid`), SpectralOps.cpp (`stft`).
"""

import torch

from simgpu._api import recurrent
from simgpu._api.patch import Patch, patches
from simgpu._dispatch.errors import differs
from simgpu._dispatch.named_devices import HOST
from simgpu._dispatch.placement import gpu_of


def _device(tensor: torch.Tensor) -> torch.device:
    gpu = gpu_of(tensor)
    return gpu.device if gpu else HOST


def _are_apart(*tensors) -> bool:
    gpus = [gpu_of(t) for t in tensors if isinstance(t, torch.Tensor)]
    return any(gpu is not gpus[0] for gpu in gpus)


# -- recurrent networks ----------------------------------------------------------------


def _check_rnn(first, hidden, parameters) -> None:
    """Compare the hidden states with the input, and then the parameters."""
    __tracebackhide__ = True
    hidden = [hidden] if isinstance(hidden, torch.Tensor) else hidden
    for name, tensors in (("hidden", hidden), ("parameter", parameters)):
        for tensor in tensors:
            if _are_apart(first, tensor):
                raise RuntimeError(
                    f"Input and {name} tensors are not at the same device, found input "
                    f"tensor at {_device(first)} and {name} tensor at {_device(tensor)}"
                )


def _rnn(raw):
    def run(*args, **kwargs):
        __tracebackhide__ = True
        if len(args) > 3:  # a packed sequence has its batch sizes behind the data
            packed = isinstance(args[3], (list, tuple))
            _check_rnn(args[0], *(args[2:4] if packed else args[1:3]))
        return raw(*args, **kwargs)

    return run


def _cell(raw, kind: str, state: str):
    """`torch.lstm_cell` and `torch.gru_cell`, which CUDA fuses behind two products."""

    def run(input, hx, w_ih, w_hh, b_ih=None, b_hh=None):
        __tracebackhide__ = True
        if gpu_of(input) is not None:
            first, last = (hx, hx) if isinstance(hx, torch.Tensor) else hx
            for left, right in ((input, w_ih), (first, w_hh)):
                if _are_apart(left, right):
                    words = differs("mat2", _device(right), _device(left), "mm")
                    raise RuntimeError(words)
            names = (state, "input_bias", "hidden_bias")
            for name, tensor in zip(names, (last, b_ih, b_hh), strict=True):
                if _are_apart(input, tensor):
                    raise RuntimeError(
                        differs(name, _device(tensor), _device(input),
                                f"__thnn_fused_{kind}_cell")
                    )  # fmt: skip
        return raw(input, hx, w_ih, w_hh, b_ih, b_hh)

    return run


# -- others ----------------------------------------------------------------------------


def _compared(raw, words: str, first: str, second: str):
    """A function of two tensors that must be on one device.

    Args:
        raw: PyTorch's.
        words: of the error; the two devices are put in.
        first, second: names of the arguments; they are the first two, or by name.
    """

    def run(*args, **kwargs):
        __tracebackhide__ = True
        named = {**dict(zip((first, second), args, strict=False)), **kwargs}
        pair = named.get(first), named.get(second)
        if all(isinstance(tensor, torch.Tensor) for tensor in pair):
            if _are_apart(*pair):
                raise RuntimeError(words.format(*map(_device, pair)))
        return raw(*args, **kwargs)

    return run


_GRID = (
    "grid_sampler(): expected input and grid to be on same device, but input is on {} "
    "and grid is on {}"
)
_QUANTILE = "quantile() q tensor must be on the same device as the input tensor"


def _meshgrid(raw):
    def run(*tensors, **kwargs):
        __tracebackhide__ = True
        lists = tensors[:1] if tensors and isinstance(tensors[0], (list, tuple)) else ()
        if _are_apart(*(lists[0] if lists else tensors)):
            raise RuntimeError("meshgrid expects all tensors to have the same device")
        return raw(*tensors, **kwargs)

    return run


def _stft(raw):
    def run(input, *args, **kwargs):
        __tracebackhide__ = True
        window = args[3] if len(args) > 3 else kwargs.get("window")
        if window is not None and _are_apart(input, window):
            raise RuntimeError(
                f"{raw.__name__} input and window must be on the same device but got "
                f"self on {_device(input)} and window on {_device(window)}"
            )
        return raw(input, *args, **kwargs)

    return run


def rows() -> list[Patch]:
    """Their part of the table of replacements."""
    quantiles = ("quantile", "nanquantile")
    of_tensors = {
        name: _compared(getattr(torch.Tensor, name), _QUANTILE, "input", "q")
        for name in quantiles
    }
    return [
        *patches(
            torch, "C++ sees CPU tensors and compares no devices", "call",
            lstm_cell=_cell(torch.lstm_cell, "lstm", "cx"),
            gru_cell=_cell(torch.gru_cell, "gru", "hx"),
            meshgrid=_meshgrid(torch.meshgrid),
            stft=_stft(torch.stft), istft=_stft(torch.istft),
            **{name: _rnn(run) for name, run in recurrent.functions.items()},
            **{
                name: _compared(getattr(torch, name), _QUANTILE, "input", "q")
                for name in quantiles
            },
        ),
        *patches(
            torch, "C++ sees CPU tensors and compares no devices", "both",
            grid_sampler=_compared(torch.grid_sampler, _GRID, "input", "grid"),
        ),
        *patches(
            torch.Tensor, "C++ sees CPU tensors and compares no devices", "call",
            **of_tensors,
        ),
    ]  # fmt: skip
