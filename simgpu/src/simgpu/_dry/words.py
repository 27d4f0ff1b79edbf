"""A dry run's report in words."""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simgpu._dry.report import DryReport

_MIB, _GIB = 2**20, 2**30
_LOW_MFU = 0.05  # at which one asks what the card computes
_LINES = 12  # that a report shows of each table
_FLEX = {
    "compiled": "  flex_attention is compiled: fused kernels, which hold no scores",
    "uncompiled": "  flex_attention is not compiled: it holds all scores, which "
    "torch.compile(flex_attention) does not",
}


def _bytes(size: float) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= _GIB / 10 else f"{size / _MIB:.1f} MiB"


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:,.3g}"


def _time_of(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 100 else f"{seconds:,.1f} s"


def lines(report: "DryReport") -> list[str]:
    ranks = ", ".join(map(str, report.ranks))
    which = f"rank {ranks}" if len(report.ranks) == 1 else f"ranks {ranks}"
    used = max(report.used_bytes, report.reserved_bytes)
    lines = [f"{which} of {report.world:,} on {report.card}, simulated, without values"]
    if report.fits:
        so_far = "" if report.steps else ", before any step of an optimizer"
        lines.append(
            f"fits: {_bytes(report.total_bytes - used)} of "
            f"{_bytes(report.total_bytes)} are left{so_far}"
        )
    else:
        lines.append(f"does not fit: {report.error_line} asks for too much")
        lines.append(f"  {_briefly_full(report.error)}")
    lines += ["", f"memory at the peak   {_bytes(report.peak_bytes):>12}"
              f"   ({_bytes(report.reserved_bytes)} reserved, {_bytes(used)} of the "
              "card in use)"]  # fmt: skip
    lines += [f"  {kind:<19}{_bytes(size):>12}"
              for kind, size in report.memory_by_kind.items()]  # fmt: skip
    lines += _largest(report)
    if report.outside_by_owner:
        lines.append("  beside PyTorch's memory:")
    lines += [f"    {owner:<43}{_bytes(size):>12}"
              for owner, size in report.outside_by_owner.items()]  # fmt: skip
    if report.step_seconds is None:
        words = "no step to time: fewer than two calls of Optimizer.step were seen"
        lines += ["", words]
    elif not report.step_seconds:
        lines += ["", "nothing ran on the GPU between the last two steps"]
    else:
        lines += _step(report)
    lines += _of_compiling(report)
    if report.unknown_reads:
        lines += ["", "values that were read and are not known here:"]
        for read in report.unknown_reads[:_LINES]:
            times = "" if read["times"] == 1 else f", {read['times']:,} times"
            lines.append(f"  {read['line']}: {read['value']}{times}")
        if more := report.unknown_reads[_LINES:]:
            lines.append(f"  and on {len(more)} other lines")
    if len(report.kinds) > 1:
        lines += ["", "each rank that ran        peak     computing      messages"]
        for its in report.kinds:
            times = [its.compute_seconds or 0.0, its.exposed_seconds or 0.0]
            shown = "".join(f"{_time_of(t):>14}" for t in times)
            lines.append(
                f"  rank {its.ranks[0]:<10}{_bytes(its.peak_bytes):>13}{shown}"
            )
    return lines


def _briefly_full(error: str) -> str:
    """Of what PyTorch says how much was asked for; of what NCCL says, its reason."""
    if error.startswith("NCCL"):
        return f"NCCL's buffers: {error.rpartition(chr(10))[2]}"
    return error.partition(" GPU ")[0]


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


def _largest(report: "DryReport") -> list[str]:
    rows = [
        row for row in report.memory_by_line if row["bytes"] > report.peak_bytes / 50
    ]
    if not rows:
        return []
    return ["  the lines that hold most:"] + [
        f"    {row['line']:<28}{row['kind']:<15}{_bytes(row['bytes']):>12}"
        for row in rows[:_LINES]
    ]


def _step(report: "DryReport") -> list[str]:
    seconds = report.step_seconds
    assert seconds is not None

    def share(words: str, part: float) -> str:
        return f"  {words:<26}{_time_of(part):>14}  {part / seconds:4.0%}"

    lines = ["", f"a step                    {_time_of(seconds):>16}"]
    lines.append(share("computing", report.compute_seconds or 0.0))
    lines.append(share("messages, nothing else", report.exposed_seconds or 0.0))
    lines += [f"    {briefly(name):<38}{_time_of(part):>14}"
              for name, part in list(report.exposed_by_group.items())[:4]]  # fmt: skip
    lines.append(share("the host keeps it waiting", report.host_seconds or 0.0))
    if report.host_computes_seconds:
        name = "the host computes"
        lines.append(f"    {name:<38}{_time_of(report.host_computes_seconds):>14}")
    lines.append(f"  what binds: {report.binds}")
    for rate, count, name in report.rates():
        lines.append(
            f"  {_rate(rate)} {name}/s, {_rate(rate / report.world)} of a rank "
            f"({count:,} {name} a step)"
        )
    lines.append(
        f"  MFU {report.mfu:.1%}" if report.mfu else "  MFU: no matrix product"
    )
    if report.binds == "computing" and 0.0 < (report.mfu or 0.0) < _LOW_MFU:
        longest = [*report.seconds_by_kernel.items()][:3]
        lines.append("  can that be? of the time of kernels, the most have")
        lines += [share(f"  {name}"[:26], part) for name, part in longest]
    return lines


def _of_compiling(report: "DryReport") -> list[str]:
    """What of a program counts as compiled."""
    lines = []
    if report.compiled == "eager" and report.step_seconds:
        lines.append("  torch.compile gave back what it was given (--no-compile)")
    elif report.compiled == "fuse" and report.step_seconds:
        lines.append("  torch.compile: chains of pointwise operations and reductions "
                     "counted as one kernel")  # fmt: skip
    for how in report.flex_attention:
        lines.append(_FLEX[how])
    return lines
