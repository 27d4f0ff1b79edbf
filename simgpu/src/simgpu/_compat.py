"""Every private name of PyTorch that the simulator uses: the table is beside it.

Other files import them from here: `from simgpu._compat import current_autograd_node`.
A name is looked up when a file asks for it. Where PyTorch does not have it, something
stands for it that raises `NotSimulated` when it is used, with the feature that needs
it; everything else goes on. If a feature would go wrong unnoticed without the name, the
functions behind which it lies (`DOORS`) are refused instead.

Not here: names that the simulator only gives to PyTorch, such as `_cuda_init` of
`torch._C`, which a build without CUDA does not have either. They stand in the table of
replacements and in what it collects.
"""

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

from simgpu._errors import NotSimulated
from simgpu._private_names import NAMES as _NAMES

OLDEST, NEWEST = (2, 11), (2, 15)  # the versions of PyTorch that are tested

# names without which a feature would go wrong unnoticed -> functions that are refused
_BACKWARD = ("torch.autograd.backward", "torch.autograd.grad")
DOORS = {
    "raw_run_backward": _BACKWARD,
    "current_autograd_node": _BACKWARD,
    "current_graph_task_id": _BACKWARD,
    "raw_new_process_group": (
        "torch.distributed.distributed_c10d.init_process_group",
        "torch.distributed.init_process_group",
    ),
}
# what stands for names that are asked for everywhere: true where no backward runs
_ANSWERS: dict[str, Any] = {
    "current_autograd_node": lambda: None,
    "current_graph_task_id": lambda: -1,
}
_missing: dict[str, "_Absent"] = {}  # our names of what was looked up in vain


class _Absent(type):
    """The class of what stands for names that PyTorch does not have.

    Nothing is an instance of it, and whatever is called on it raises.
    """

    path: str
    feature: str

    def __call__(cls, *args, **kwargs):
        raise cls.error()

    def __getattr__(cls, name: str) -> "_Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{cls.path}.{name}", cls.feature)

    def __instancecheck__(cls, instance) -> bool:
        return False

    def __contains__(cls, item) -> bool:
        raise cls.error()

    def error(cls) -> NotSimulated:
        import torch

        return NotSimulated(
            cls.feature,
            f"PyTorch {torch.__version__} has no {cls.path}; simgpu is tested with "
            f"{_tested()}.",
        )


@functools.cache
def _absent(path: str, feature: str) -> _Absent:
    known = {"path": path, "feature": feature, "__code__": None, "__file__": ""}
    known |= {"__enter__": None}  # what other files keep of it when they are loaded
    return _Absent("Absent", (), known)


def is_absent(value: object) -> bool:
    """Whether it stands for a name that this PyTorch does not have."""
    return isinstance(value, _Absent)


def _find(path: str) -> object:
    """What has the name `path`.

    Raises:
        AttributeError, ImportError: if nothing has.
    """
    names = path.split(".")
    value: object = importlib.import_module(names[0])
    for count, name in enumerate(names[1:], 2):
        try:
            value = getattr(value, name)
        except AttributeError:
            value = importlib.import_module(".".join(names[:count]))
    return value


def __getattr__(name: str) -> Any:
    """PyTorch's object of this name, or what stands for it."""
    for feature, names in _NAMES.items():
        if name in names:
            try:
                value = _find(names[name])
            except (AttributeError, ImportError):
                _missing[name] = _absent(names[name], feature)
                value = _ANSWERS.get(name, _missing[name])
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def fake_backend() -> None:
    """Register PyTorch's backend "fake", which does nothing.

    Raises:
        NotSimulated: if this PyTorch does not have it.
    """
    path = "torch.testing._internal.distributed.fake_pg"
    try:
        importlib.import_module(path)
    except ImportError:
        raise _absent(path, "torch.distributed").error() from None


def memory_segments() -> list[dict]:
    """What the allocators of all GPUs hold, as PyTorch's snapshot describes it."""
    import torch

    return torch.cuda.memory._snapshot()["segments"]


def forward_ad_level() -> int:
    """How many levels of forward-mode AD are entered, less one."""
    import torch

    return torch.autograd.forward_ad._current_level


def _refuse(absent: _Absent) -> Callable:
    def refuse(*args, **kwargs):
        raise absent.error()

    return refuse


def refusals() -> list[tuple[object, str, object]]:
    """(owner, name, what raises) for each function that is not to be called."""
    rows = []
    for name, doors in DOORS.items():
        __getattr__(name)
        for door in doors if name in _missing else ():
            owner, _, attribute = door.rpartition(".")
            rows.append((_find(owner), attribute, _refuse(_missing[name])))
    return rows


# -- versions --------------------------------------------------------------------------


def _tested() -> str:
    return f"PyTorch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def check_packages() -> None:
    """Whether what the simulator needs is there, and not too old.

    Raises:
        ImportError: if not, in a sentence that says what to do.
    """
    for package in ("torch", "numpy"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(
                f"simgpu needs {package}, which is not installed here: "
                f"pip install {package}"
            )
    import torch

    if _version(torch.__version__) < OLDEST:
        raise ImportError(
            f"simgpu needs {_tested()}, and this is {torch.__version__}: "
            "pip install --upgrade torch"
        )


@functools.cache
def warn_of_newer_torch() -> None:
    """Say once, in one line, that this PyTorch is newer than those that are tested."""
    import torch

    if _version(torch.__version__) > NEWEST:
        warnings.warn(
            f"simgpu is tested with {_tested()}, and this is {torch.__version__}: "
            "please report what fails, with both versions, to simgpu's issues",
            stacklevel=3,
        )


@functools.cache
def is_torch(oldest: tuple[int, int]) -> bool:
    """Whether this PyTorch is that version or a newer one."""
    import torch

    return _version(torch.__version__) >= oldest


def _version(text: str) -> tuple[int, int]:
    """(2, 15) of "2.15.0+cpu"."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
