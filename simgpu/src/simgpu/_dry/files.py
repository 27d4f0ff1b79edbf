"""Checkpoints of a dry run: their shapes are read and written, and no values.

What is large is skipped in a file, as by `torch.serialization.skip_data`: `torch.load`
makes tensors without values, and `torch.save` leaves a hole of the right size. What is
small, as a random state or a counter, is read and written as ever.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

from simgpu import _runtime as state
from simgpu._compat import (
    DisableTorchDispatch,
    DisableTorchFunction,
    raw_open_zip_reader,
    raw_open_zip_writer,
)
from simgpu._dry import values

NOT_WRITTEN = "a file of shapes, without these values"


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """`torch.save` and `torch.load` skip the values that a dry run does not know."""
    module = torch.serialization
    with (
        mock.patch.object(module, "_open_zipfile_reader", _Opened.reader),
        mock.patch.object(module, "_open_zipfile_writer", _Opened.writer),
    ):
        yield


class _Opened:
    """What `torch.save` and `torch.load` enter to open a file."""

    def __init__(self, opened, kind):
        self._opened, self._kind = opened, kind

    @classmethod
    def reader(cls, *args):
        return cls(raw_open_zip_reader(*args), _Reader)

    @classmethod
    def writer(cls, *args):
        return cls(raw_open_zip_writer(*args), _Writer)

    def __enter__(self):
        return self._kind(self._opened.__enter__())

    def __exit__(self, *args):
        return self._opened.__exit__(*args)


class _File:
    """PyTorch's own reader or writer of an archive."""

    def __init__(self, file):
        self._file = file

    def __getattr__(self, name: str):
        return getattr(self._file, name)


class _Reader(_File):
    def get_storage_from_record(self, name: str, nbytes: int, kind):
        if nbytes <= values.SMALL:
            return self._file.get_storage_from_record(name, nbytes, kind)
        with DisableTorchFunction(), DisableTorchDispatch():
            return values.forget(torch.empty(nbytes, dtype=torch.uint8))


class _Writer(_File):
    def write_record(self, name: str, data, nbytes: int):
        large = isinstance(data, torch.UntypedStorage) and nbytes > values.SMALL
        if not large:
            return self._file.write_record(name, data, nbytes)
        state.current().dry.note_read(NOT_WRITTEN)
        return self._file.write_record_metadata(name, nbytes)
