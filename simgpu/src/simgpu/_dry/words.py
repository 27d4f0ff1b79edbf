"""Words of a report that are not numbers: groups of ranks, what was compiled."""

import re


def briefly(name: str) -> str:
    """A collective and its group: "ranks 0 to 24 by 8" for "ranks 0, 8, 16, 24"."""
    many = re.search(r"\d+(, \d+){3,}", name)
    if many is None:
        return name
    ranks = [int(word) for word in many[0].split(", ")]
    by = ranks[1] - ranks[0]
    if ranks == list(range(ranks[0], ranks[-1] + 1, by or 1)):
        short = f"{ranks[0]} to {ranks[-1]}" + (f" by {by}" if by != 1 else "")
    else:
        short = f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]} ({len(ranks)})"
    return name.replace(many[0], short)


def of_compiling(report) -> list[str]:
    """What of a program counts as compiled."""
    lines = []
    if report.compiled == "eager" and report.step_seconds:
        lines.append("  torch.compile gave back what it was given (--no-compile)")
    elif report.compiled == "fuse" and report.step_seconds:
        lines.append("  torch.compile: chains of pointwise operations and reductions "
                     "counted as one kernel (--compile fuse)")  # fmt: skip
    for how in report.flex_attention:
        lines.append(_FLEX[how])
    return lines


_FLEX = {
    "compiled": "  flex_attention is compiled: fused kernels, which hold no scores",
    "uncompiled": "  flex_attention is not compiled: it holds all scores, which "
    "torch.compile(flex_attention) does not",
}
