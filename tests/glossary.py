"""The terms of notebooks/glossary.md, and where a lesson first uses each.

An entry of the glossary is one line,

    * <a id="race"></a>**Race**: what it is. [06](06-catch-races.ipynb)

and `glossary.md#race` leads to it in JupyterLab, on GitHub and on a site: a
heading would not do, since each of them makes another anchor of its words. The names of
an entry are its bold words, the abbreviation in brackets behind them, and what the
table ALSO adds. A name in backticks is one of code, and stands for a code span.
"""

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ENTRY = re.compile(r'^\* <a id="([a-z0-9-]+)"></a>\*\*(.+?)\*\*: (.+)$', re.M)

# Other names of an entry, by its anchor. Plurals need no name of their own.
ALSO: dict[str, tuple[str, ...]] = {
    "activation-checkpointing": ("recomputation",),
    "alpha-beta": ("alpha-beta", "latency-bandwidth model"),
    "allocated-memory": ("allocated",),
    "bfloat16": ("bf16",),
    "capacity": ("capacity",),
    "context-parallelism": ("context parallel",),
    "data-loader-worker": ("data loader worker",),
    "data-parallel-class": ("`torch.nn.DataParallel`", "`DataParallel`"),
    "data-parallelism": ("data parallel", "data-parallel"),
    "dcp": ("`torch.distributed.checkpoint`",),
    "ddp": ("`DistributedDataParallel`",),
    "device-agnostic": ("device-agnostic",),
    "elastic": ("elastic", "`torch.distributed.elastic`"),
    "event": ("event",),
    "expert-parallelism": ("expert parallel",),
    "exposed": ("exposed",),
    "factory": ("factory",),
    "fork": ("`fork`", "forked", "forking"),
    "fsdp": ("FSDP2", "`fully_shard`"),
    "handle": ("IPC handle",),
    "hang": ("hanging", "hung"),
    "hsdp": ("hybrid sharding",),
    "interleaved-schedule": ("interleaved", "interleaving"),
    "kernel-launch": ("launch", "launches", "launched", "launching"),
    "leaf": ("leaf",),
    "load-balancing": ("load balancing", "balance loss"),
    "loss-scaling": ("loss scale",),
    "meta-device": ('`torch.device("meta")`',),
    "node": ("node",),
    "offloading": ("offload", "offloaded"),
    "out-of-memory": ("`OutOfMemoryError`", "`torch.OutOfMemoryError`"),
    "overlap": ("overlapping", "overlapped"),
    "peak-memory": ("peak",),
    "pinned-memory": ("pinned", "pinning"),
    "pipeline-parallelism": ("pipeline",),
    "placement": ("`Shard`", "`Replicate`", "`Partial`", "`Shard(0)`", "`Shard(1)`"),
    "prefetch": ("prefetch",),
    "rdma": ("GPUDirect RDMA", "GPUDirect"),
    "reserved-memory": ("reserved",),
    "ridge-point": ("ridge",),
    "ring": ("ring", "ring all-reduce"),
    "shard": ("sharded", "sharding"),
    "spawn": ("`spawn`",),
    "state-dict": ("`state_dict`", "`state_dict()`"),
    "sync-batch-norm": ("`nn.SyncBatchNorm`", "`SyncBatchNorm`"),
    "synchronize": ("`torch.cuda.synchronize`", "`torch.cuda.synchronize()`"),
    "tree": ("tree",),
    "zero-bubble": ("zero-bubble",),
}

# Everyday words, which mean something else in other sentences and other lessons. They
# are terms, and linked, only in the lessons that their entry names.
COMMON = frozenset(
    "agent allocated-memory bandwidth block buffer capacity checkpoint"
    " data-loader-worker device elastic event exposed factory gather handle hook"
    " host kernel-launch leaf load-balancing node out-of-memory overlap parameter"
    " peak-memory pipeline-stage placement prefetch profiler race reduce"
    " reserved-memory ring router scatter segment shared-memory store synchronize"
    " throughput timeline tree warm-up".split()
)

# Phrases that have a name of an entry, and do not mean it.
OTHER = ("restart the kernel", "streams of data", "input pipeline")


@dataclass(frozen=True)
class Entry:
    """An entry of the glossary.

    Attributes:
        anchor: What follows `glossary.md#`.
        names: All that a lesson may call it, except for plurals.
        lessons: The numbers of the lessons that the entry links to, such as "03".
    """

    anchor: str
    names: tuple[str, ...]
    lessons: frozenset[str]

    def belongs_in(self, lesson: str) -> bool:
        """Whether its first use is linked in the lesson with this number."""
        return self.anchor not in COMMON or lesson in self.lessons


@dataclass(frozen=True)
class Use:
    """A place in the prose of a lesson that has a term, or a link to its entry."""

    anchor: str
    start: int
    end: int
    linked: bool


@functools.cache
def entries(text: str) -> tuple[Entry, ...]:
    """Returns the entries of a glossary, given its text."""
    found = []
    for anchor, head, rest in ENTRY.findall(text):
        name, short = re.fullmatch(r"(.+?)(?: \((.+?)\))?", head).groups()
        names = (name, short, *ALSO.get(anchor, ()))
        lessons = frozenset(re.findall(r"\]\((\d\d)-", rest))
        found.append(Entry(anchor, tuple(filter(None, names)), lessons))
    return tuple(found)


def of(path: Path) -> tuple[Entry, ...]:
    """Returns the entries of the glossary beside a lesson."""
    return entries((path.parent / "glossary.md").read_text(encoding="utf-8"))


# -- where a text uses a term ----------------------------------------------------------

LINK = re.compile(
    r"!?\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]*(?:\([^()]*\)[^()\s]*)*)\)"
)
TO_GLOSSARY = re.compile(r"glossary\.md#([a-z0-9-]+)")
CODE_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
OTHER_SENSES = re.compile("|".join(OTHER), re.I)
NOT_PROSE = re.compile(
    r"^(```|~~~).*?^\1"  # a fenced block
    r"|^#{1,6} .*?$"  # a heading
    r"|^\*\d+ minutes.*?$"  # the line that says how long a lesson takes
    r"|^\|.*\|\n(?=\|[-:| ]+\|$)"  # the first row of a table
    r"|^\[[^\]]+\]: .*?$|<[^<>\n]+>"  # where a link leads, HTML
    r"|\$\$.+?\$\$|\$[^$\n]+\$",
    re.M | re.S,
)


def blank(text: str, start: int, end: int) -> str:
    return text[:start] + "\0" * (end - start) + text[end:]


@functools.cache
def pattern_of(name: str) -> str:
    """Returns a regular expression for a name and its plural."""
    if name.startswith("`"):
        return re.escape(name)
    words = []
    for word in name.split():
        abbreviation = re.search("[A-Z].*[A-Z]", word)
        words.append(re.escape(word) if abbreviation else f"(?i:{re.escape(word)})")
    plural = "(?:e?s)?"
    if name.endswith("y"):
        words[-1], plural = words[-1].replace("y)", "(?:y|ies))"), ""
    return r"(?<![\w-])" + r"\s+".join(words) + plural + r"(?![\w-])"


def uses(text: str, terms: Iterable[Entry]) -> Iterator[Use]:
    """Yields each use of a term in the markdown text of a cell, in reading order.

    Prose counts, without headings, tables' first rows, code, formulas and HTML. Where
    two names begin at one place, the longer one counts. Inside links nothing is a use,
    but a link to an entry of the glossary is one of this entry.
    """
    by_name = {name: each.anchor for each in terms for name in each.names}
    found = []
    rest = text
    for match in NOT_PROSE.finditer(text):
        rest = blank(rest, *match.span())
    for match in LINK.finditer(rest):
        if to := TO_GLOSSARY.fullmatch(match[2]):
            found.append(Use(to[1], *match.span(), linked=True))
        rest = blank(rest, *match.span())
    for match in OTHER_SENSES.finditer(rest):
        rest = blank(rest, *match.span())
    for match in CODE_SPAN.finditer(rest):
        if match[0] not in by_name:
            rest = blank(rest, *match.span())
    names = sorted(by_name, key=len, reverse=True)
    if names:
        any_name = re.compile("|".join(f"({pattern_of(name)})" for name in names))
        for match in any_name.finditer(rest):
            anchor = by_name[names[match.lastindex - 1]]
            found.append(Use(anchor, *match.span(), linked=False))
    yield from sorted(found, key=lambda use: use.start)


def first_uses(
    cells: Iterable[tuple[int, str]], lesson: str, terms: Iterable[Entry]
) -> Iterator[tuple[int, Use]]:
    """Yields where a lesson first uses each term that belongs in it.

    Args:
        cells: The number and the text of each markdown cell.
        lesson: The number of the lesson, such as "03".
        terms: The entries of the glossary.
    """
    wanted = {each.anchor for each in terms if each.belongs_in(lesson)}
    for number, text in cells:
        for use in uses(text, terms):
            if use.anchor in wanted:
                wanted.remove(use.anchor)
                yield number, use
