"""Pickle what a notebook and its ranks send to each other.

`cloudpickle` takes functions that are defined in a cell. From 3.1.3 on it forgets in
which file a function's code was (it writes `<dynamic-code>`), and a traceback in a rank
would then name neither the cell nor the line. Here the file's name is kept.
"""

import io
from collections import ChainMap
from collections.abc import Callable
from types import CodeType

import cloudpickle


def _reduce_code(code: CodeType) -> tuple:
    make, args = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _make_code, (make, args, code.co_filename)


def _make_code(make: Callable, args: tuple, filename: str) -> CodeType:
    return make(*args).replace(co_filename=filename)


class _Pickler(cloudpickle.Pickler):
    """cloudpickle's, with the names of files in the code of functions."""

    dispatch_table = ChainMap(
        {CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table
    )


def dumps(value) -> bytes:
    """The value as bytes for `pickle.loads`.

    Raises:
        Whatever pickling raises for a value that cannot be sent.
    """
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()
