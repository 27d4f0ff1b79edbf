"""Which operations have no kernel for CUDA, as a PyTorch built for CUDA knows.

    python simgpu/tests/tools/cuda_kernels.py          compare with the table
    python simgpu/tests/tools/cuda_kernels.py --write  write the table

It needs a PyTorch that is built for CUDA, and no GPU: its dispatcher has all kernels.
What other versions have found before stays in the table, unless this one has a kernel.
"""

import argparse
import sys
from pathlib import Path

import torch

from simgpu._compat import has_computed_kernel
from simgpu._dispatch import without_cuda

# the CPU's key of PyTorch's dispatcher -> CUDA's
KEYS = {"CPU": "CUDA", "QuantizedCPU": "QuantizedCUDA", "SparseCsrCPU": "SparseCsrCUDA"}
# not in the table: what C++ calls because it sees a CPU tensor, what has no tensor to
# tell the device by, and what the simulator answers itself
ELSEWHERE = (
    "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::mkldnn_rnn_layer",
    "aten::_empty_affine_quantized", "aten::_empty_per_channel_affine_quantized",
    "aten::_make_dep_token", "aten::_foobar", "aten::_test_", "aten::from_file",
    "c10d::",
)  # fmt: skip


_names = torch._C._dispatch_get_all_op_names


def lacking() -> dict[str, set[str]]:
    """CUDA's key -> operations that have a kernel for the CPU and none for it."""
    found: dict[str, set[str]] = {key: set() for key in KEYS.values()}
    for name in _names():
        if name.startswith(ELSEWHERE):
            continue
        for cpu, cuda in KEYS.items():
            if has_computed_kernel(name, cpu) and not has_computed_kernel(name, cuda):
                found[cuda].add(name)
    return found


def merged() -> dict[str, set[str]]:
    """The table, with what this version of PyTorch knows better."""
    here, known = lacking(), set(_names())
    return {
        key: {name for name in without_cuda.LACKING[key] if name not in known} | names
        for key, names in here.items()
    }


def differences() -> list[str]:
    """Where the table says something else than this version of PyTorch."""
    here, known = lacking(), set(_names())
    found = []
    for key, names in here.items():
        table = {name for name in without_cuda.LACKING[key] if name in known}
        found += [f"{key}: {name} is missing" for name in sorted(names - table)]
        found += [f"{key}: {name} has a kernel" for name in sorted(table - names)]
    return found


def written(table: dict[str, set[str]]) -> str:
    lines = [f'"""{without_cuda.__doc__}"""', ""]
    lines.append("LACKING: dict[str, frozenset[str]] = {")
    for key, names in table.items():
        lines.append(f'    "{key}": frozenset(')
        lines.append('        """')
        line = ""
        for name in sorted(names):
            if line and len(line) + len(name) > 86:
                lines.append(line.rstrip())
                line = ""
            line += f"{name} "
        lines += [line.rstrip(), '""".split()', "    ),"]
    lines.append("}")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the table")
    if not torch.backends.cuda.is_built():
        sys.exit(f"PyTorch {torch.__version__} is not built for CUDA")
    if parser.parse_args().write:
        text = written(merged())
        Path(without_cuda.__file__).write_text(text, encoding="utf-8")
        return 0
    found = differences()
    print("\n".join(found) or f"the table is right for PyTorch {torch.__version__}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
