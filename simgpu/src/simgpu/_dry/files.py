"""Checkpoints of a dry run: their shapes are read and written, and no values.

What is large is skipped in a file, as by `torch.serialization.skip_data`: `torch.load`
makes tensors without values, and `torch.save` leaves a hole of the right size. What is
small, as a random state or a counter, is read and written as ever.

A distributed checkpoint is planned by each rank that runs as if it were alone: nobody
knows the plans of the others, and 16,384 of them would be too many. So it has the
parts of this rank, and another job cannot read it.

A file that was there before stays as it is: it may be worth more than a dry run.
"""

import contextlib
import io
import os
from collections.abc import Iterator
from unittest import mock

import torch
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata

from simgpu import _runtime as state
from simgpu._compat import (
    DisableTorchDispatch,
    DisableTorchFunction,
    DistWrapper,
    raw_open_zip_reader,
    raw_open_zip_writer,
    raw_validate_plan,
)
from simgpu._dry import values

_raw_init = DistWrapper.__init__
_raw_stream, _raw_rename = FileSystem.create_stream, FileSystem.rename
_raw_remove = FileSystem.rm_file
NOT_WRITTEN = "a file of shapes, without these values"
KEPT = "{} is there, and stays as it is"
_ours: set[str] = set()  # files that this dry run has written


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """`torch.save` and `torch.load` skip the values that a dry run does not know."""
    module = torch.serialization
    with (
        mock.patch.object(module, "_open_zipfile_reader", _Opened.reader),
        mock.patch.object(module, "_open_zipfile_writer", _Opened.writer),
        mock.patch.object(DistWrapper, "__init__", _plans_alone),
        mock.patch.object(default_planner, "_validate_global_plan", _is_right),
        mock.patch.object(FileSystem, "create_stream", _stream),
        mock.patch.object(FileSystem, "rename", _rename),
        mock.patch.object(FileSystem, "rm_file", _remove),
        _safetensors(),
    ):
        _ours.clear()
        yield


def _plans_alone(wrapper, group, use_dist: bool, coordinator_rank: int) -> None:
    _raw_init(wrapper, group, False, coordinator_rank)


def _is_right(plan, metadata):
    """That nothing is wrong, as PyTorch says it of a plan that has no parts."""
    return raw_validate_plan([], Metadata({}))


def _stays(path) -> bool:
    """Whether there is a file that is not to be written; the report tells of it."""
    path = os.path.abspath(path)
    if path in _ours or not os.path.exists(path):
        _ours.add(path)
        return False
    state.current().dry.note_read(KEPT.format(os.path.basename(path)))
    return True


@contextlib.contextmanager
def _stream(system, path, mode: str):
    if "r" not in mode and _stays(path):
        yield _Nowhere()
    else:
        with _raw_stream(system, path, mode) as stream:
            yield stream


def _safetensors() -> contextlib.AbstractContextManager:
    """Its files stay, too, where it is installed."""
    try:
        from safetensors import torch as module
    except ImportError:
        return contextlib.nullcontext()
    write = module.serialize_file

    def serialize_file(tensors, filename, *args, **kwargs):
        if not _stays(filename):
            write(tensors, filename, *args, **kwargs)

    return mock.patch.object(module, "serialize_file", serialize_file)


def _rename(system, path, new_path) -> None:
    if _stays(new_path):
        _raw_remove(system, path)
    else:
        _raw_rename(system, path, new_path)


def _remove(system, path) -> None:
    if not _stays(path):
        _raw_remove(system, path)


class _Nowhere(io.RawIOBase):
    """A stream that keeps nothing, but knows how much it was given."""

    def __init__(self):
        self._place = 0

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        count = memoryview(data).nbytes
        self._place += count
        return count

    def tell(self) -> int:
        return self._place


class _Opened:
    """What `torch.save` and `torch.load` enter to open a file."""

    def __init__(self, opened, kind):
        self._opened, self._kind = opened, kind

    @classmethod
    def reader(cls, *args):
        return cls(raw_open_zip_reader(*args), _Reader)

    @classmethod
    def writer(cls, to):
        path = isinstance(to, (str, os.PathLike))
        if path and _stays(to):
            path, to = False, _Nowhere()
        return cls(raw_open_zip_writer(to if path else _Stream(to)), _Writer)

    def __enter__(self):
        return self._kind(self._opened.__enter__())

    def __exit__(self, *args):
        return self._opened.__exit__(*args)


class _Stream:
    """A program's stream, in which a hole can be left; it may not be able to seek."""

    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def seek(self, nbytes: int, whence: int) -> None:
        """Go on by so many bytes: so PyTorch leaves a hole."""
        within = getattr(self._stream, "raw", None)  # of a distributed checkpoint
        for stream in filter(None, (self._stream, within)):
            if hasattr(stream, "seekable") and stream.seekable():
                self._stream.flush()
                stream.seek(nbytes, whence)
                return
        for first in range(0, nbytes, values.SMALL):
            self._stream.write(bytes(min(values.SMALL, nbytes - first)))


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
        is_storage = isinstance(data, torch.UntypedStorage)
        large = is_storage and nbytes > values.SMALL
        if large or is_storage and hasattr(data, "_simgpu_unknown"):
            state.current().dry.note_read(NOT_WRITTEN)
        if not large:
            return self._file.write_record(name, data, nbytes)
        return self._file.write_record_metadata(name, nbytes)
