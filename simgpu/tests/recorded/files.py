"""Reading recordings: JSON files, each with the rows of one kind.

A file that `simgpu measure` has written holds several kinds of rows.
"""

import json
import zlib
from pathlib import Path
from typing import NamedTuple

from recorded.cards import add_measured
from simgpu._device import measured

# Kinds that only files of `simgpu measure` have until now
MEASURED = ("attention_sdpa", "gemm_fp64", "gemm_tf32")
# A file's name begins with the kind of its rows; "what" in it says what they hold
KINDS = (
    "add_fp16", "alloc", "allocator", "attention_bf16", "bmm_fp16", "conv_fp32",
    "copies", "gemm_bf16", "gemm_fp16", "gemm_fp32", "host_floor", "nccl_nodes",
    "nccl_nvlink", "nccl_tests", "resnet50_v100", "steps_fp32", "throughput_dle",
    "training_memory", "vector_fp32",
    *MEASURED,
)  # fmt: skip

# Of these kinds the files have only rows whose hash is even
_HALVED = ("attention_bf16", "gemm_bf16")
# Kinds that no constant is fitted to: their figures contain more than what is predicted
NOT_FITTED = ("nccl_nvlink",)


class Recording(NamedTuple):
    """One file."""

    name: str  # of the file, without ".json"
    kind: str  # one of those that are known; "" if it is none
    data: dict  # as the file has it; "rows" are its figures
    fault: str = ""  # why it cannot be read, or why not all of it


def read(folder: Path, kinds: tuple[str, ...] = KINDS) -> list[Recording]:
    """The recordings in a folder and the folders in it, by name.

    Args:
        folder: where they are.
        kinds: that are known.

    Raises:
        ValueError: if there is no such folder, or no JSON file in it.
    """
    found = Path(folder).rglob("*.json")
    paths = [path for path in found if ".ipynb_checkpoints" not in path.parts]
    paths.sort(key=lambda path: path.stem)
    if not paths:
        raise ValueError(f"no recordings (*.json) in {folder}")
    return [recording for path in paths for recording in _read(path, kinds)]


def _read(path: Path, kinds: tuple[str, ...]) -> list[Recording]:
    name = path.stem
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        return [Recording(name, _kind(name, kinds), {}, f"no JSON: {error}")]
    if not isinstance(data, dict) or data.get("kind") != measured.KIND:
        return [_of_one_kind(name, data, kinds)]
    add_measured(data)
    return [_of_one_kind(kind, its, kinds) for kind, its in data["recordings"].items()]


def _kind(name: str, kinds: tuple[str, ...]) -> str:
    return max((kind for kind in kinds if name.startswith(kind)), key=len, default="")


def _of_one_kind(name: str, data, kinds: tuple[str, ...]) -> Recording:
    kind = _kind(name, kinds)
    if not kind:
        return Recording(name, "", {}, "its name begins with no known kind")
    if not isinstance(data, dict) or not isinstance(data.get("rows"), list):
        return Recording(name, kind, {}, 'it has no list "rows"')
    return Recording(name, kind, data)


def is_fitted(row: list, kind: str = "") -> bool:
    """Whether constants may have been chosen with this row in sight: about half.

    Only the constants: the form of the rules was chosen with all rows in sight.

    Args:
        row: as the file has it.
        kind: of the file; of some, half of the rows are elsewhere.
    """
    if kind in NOT_FITTED:
        return False
    parts = 4 if kind in _HALVED else 2
    return zlib.crc32(json.dumps(row).encode()) % parts == 0
