"""How a process that has PyTorch already becomes `python script.py`.

The program finds what it would find in a new Python: its arguments, path, `__main__`
and environment, other random numbers than other processes, and no PyTorch until it
imports it (`hide_torch`).
"""

import atexit
import builtins
import contextlib
import gc
import io
import os
import random
import runpy
import signal
import sys
import threading
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import NoReturn

from simgpu import _frames as frames

_MACHINERY = (str(Path(__file__).parents[1]) + os.sep, "<frozen runpy>", runpy.__file__)


def can_run(words: list[str], folder: str) -> bool:
    """Whether these words start this Python with a program that can run here.

    It cannot if a file beside the program has the name of a module that was imported
    before: the program is to have its own.

    Args:
        words: as a launcher starts them: `[sys.executable, "-u", "train.py", "-x"]`.
        folder: where it starts them.
    """
    if words[:2] != [sys.executable, "-u"] or len(words) < 3:
        return False
    if words[2] == "-m":
        return len(words) > 3 and not _hides_imported(folder)
    path = os.path.realpath(os.path.join(folder, words[2]))
    with contextlib.suppress(OSError), open(path, "rb") as file:
        is_script = path.endswith(".py") or file.read(2) == b"#!"
        return is_script and not _hides_imported(os.path.dirname(path))
    return False  # Python says why


def _hides_imported(folder: str) -> bool:
    """Whether a module of this folder has the name of another one that is here."""
    for entry in os.scandir(os.path.realpath(folder)):
        name, path = entry.name.partition(".")[0], entry.path
        module = None if name == "__main__" else sys.modules.get(name)
        if entry.is_dir():
            path = os.path.join(path, "__init__.py")
        if module is not None and path.endswith((".py", ".so")):
            other = getattr(module, "__file__", None) or ""
            if os.path.exists(path) and os.path.realpath(other) != path:
                return True
    return False


def become(words: list[str]) -> NoReturn:
    """Be `python` with these words, to the end of the process.

    Args:
        words: behind `python -u`: a script or `-m` and a module, then arguments.
    """
    sys.orig_argv[:] = [sys.executable, "-u", *words]
    main = types.ModuleType("__main__")
    main.__builtins__ = builtins
    main.__annotations__ = {}
    sys.modules["__main__"] = main
    status = 0
    try:
        if words[0] == "-m":
            sys.argv[:] = ["-m", *words[2:]]
            _put_first(os.getcwd())
            runpy._run_module_as_main(words[1])
        else:
            sys.argv[:] = words
            _put_first(os.path.dirname(os.path.realpath(words[0])))
            _run_script(os.path.abspath(words[0]), main)
    except BaseException as error:
        status = _status_of(error)
    _leave(status)


def _put_first(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)


def _run_script(path: str, module: types.ModuleType) -> None:
    module.__file__ = path
    module.__cached__ = None
    module.__loader__ = SourceFileLoader("__main__", path)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(module))


def _status_of(error: BaseException) -> int:
    """Say why the program ends, as Python does; negative for a signal."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename.startswith(_MACHINERY):
        trace = trace.tb_next  # the program's own part is left
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _leave(status: int) -> NoReturn:
    """End as Python does, without taking PyTorch down, which takes half a second.

    What the modules of the program have is freed, so that a file that was left open,
    for example, is written.

    Args:
        status: of the process; negative for a signal.
    """
    threading._shutdown()  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and frames.is_program_code(file):
            names = dict.fromkeys(vars(module))
            names.pop("__builtins__", None)  # which a finalizer may need
            vars(module).update(names)
    gc.collect()
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            file.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


# -- PyTorch that seems not to be there ------------------------------------------------


def hide_torch() -> dict[str, types.ModuleType]:
    """Take PyTorch's modules away, as if nobody had imported them.

    So is `pynvml`, which PyTorch imports where it is installed.

    Returns:
        name -> module, for `sys.modules`, once somebody imports PyTorch.
    """
    hidden = ("torch", "pynvml")
    names = [name for name in sys.modules if name.partition(".")[0] in hidden]
    return {name: sys.modules.pop(name) for name in names}


def renew_torch() -> None:
    """Let PyTorch do again what it does with the environment when it is imported."""
    import torch
    import torch.distributed

    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    # also where it stays the same: the pool of threads was not forked
    torch.set_num_threads(int(threads) if threads.isdigit() and int(threads)
                          else torch.get_num_threads())  # fmt: skip
    if torch.distributed.is_available():
        torch.distributed.set_debug_level_from_env()


def renew_random_numbers() -> None:
    """Forked processes would all draw the same ones."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
