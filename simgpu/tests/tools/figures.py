"""Repeats published training runs as dry runs, and writes the page FIGURES.md.

    python simgpu/tests/tools/figures.py --run all           # or the names of rows
    python simgpu/tests/tools/figures.py --page              # from what is stored
    python simgpu/tests/tools/figures.py --command llama-8b  # one row, to run by hand

Rows and results are in figures.json beside their programs; no figure stands elsewhere.
"""

import argparse
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import simgpu
from simgpu._device.cards import CARDS
from simgpu._device.measured import KIND, VERSION

TESTS = Path(__file__).resolve().parents[1]
PROGRAMS = TESTS / "scripts" / "figures"
ROWS = PROGRAMS / "figures.json"
PAGE = TESTS.parent / "FIGURES.md"
# what they ran: PyTorch before it took cuDNN's attention first, or a package's own
FLASH = {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}
MEMORY = {"reserved": "reserved_bytes", "allocated": "peak_bytes"}


def read() -> dict:
    """Rows, sources and results."""
    return json.loads(ROWS.read_text(encoding="utf-8"))


def command(row: dict, folder: Path) -> list[str]:
    """What follows `python -m simgpu`, to be run in the programs' folder.

    Args:
        row: what is to be repeated.
        folder: where a card is described that the simulator's table does not have.
    """
    card = row["card"]
    if card in (variants := read()["cards"]):
        base = dataclasses.asdict(CARDS[card.split("-")[0]])
        found = {"kind": KIND, "version": VERSION, "simgpu": simgpu.__version__}
        found["card"] = base | variants[card]
        path = folder / f"{card.lower()}.json"
        path.write_text(json.dumps(found), encoding="utf-8")
        card = str(path)
    words = ["dry-run", "--world", str(row["world"]), "--card", card]
    if "network" in row:
        words += ["--network", row["network"]]
    if "--compile" in row["arguments"].split():
        words += ["--compile", "fuse"]
    return [*words, row["program"], *shlex.split(row["arguments"])]


def repeated(row: dict) -> dict:
    """Runs a row.

    Raises:
        RuntimeError: if the program fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        how, *rest = command(row, Path(folder))
        words = [sys.executable, "-m", "simgpu", how, "--json", str(report), *rest]
        done = subprocess.run(
            words, cwd=PROGRAMS, env=os.environ | FLASH, capture_output=True, text=True
        )
        if done.returncode not in (0, 3):
            raise RuntimeError(f"{row['id']}: {done.stdout[-500:]}{done.stderr}")
        found = json.loads(report.read_text(encoding="utf-8"))
    ours = {"fits": found["fits"]}
    if found["fits"]:
        ours |= {name: round(found[key] / 2**30, 2) for name, key in MEMORY.items()}
        ours["seconds"] = round(found["step_seconds"], 4)
        ours["tokens/s"] = round(found["tokens_per_second"] / row["world"])
    return ours


def memory_of(row: dict) -> tuple[float, float] | None:
    """Published and ours, in GiB, of the kind of memory that was published."""
    kinds = [kind for kind in MEMORY if kind in row["published"]]
    if not kinds or kinds[0] not in row["ours"]:
        return None
    return row["published"][kinds[0]], row["ours"][kinds[0]]


def seconds_of(row: dict) -> tuple[float, float] | None:
    """The times of a step, published and ours; of tokens/s, their reciprocals."""
    published, ours = row["published"], row["ours"]
    if "seconds" in published and "seconds" in ours:
        return published["seconds"], ours["seconds"]
    if "tokens/s" in published and "tokens/s" in ours:
        return 1 / published["tokens/s"], 1 / ours["tokens/s"]
    return None


def _share(pairs: list[tuple[float, float]], most: float) -> str:
    near = sum(max(a / b, b / a) <= most for a, b in pairs)
    return f"{near} of {len(pairs)}"


def _rows(data: dict) -> list[str]:
    lines = []
    for row in data["rows"]:
        if "ours" not in row:
            continue
        published, ours = row["published"], row["ours"]
        source = data["sources"][row["source"]]
        cells = [row["what"], f"{row['world']} {row['card']}"]
        cells.append(f"[{source['name']}]({source['address']})")
        if not published["fits"] or not ours["fits"]:
            words = {True: "fits", False: "does not fit"}
            cells += [words[published["fits"]], words[ours["fits"]], "", "", "", ""]
        else:
            pair = memory_of(row)
            cells += [f"{n:.1f}" for n in pair] if pair else ["", ""]
            cells.append(f"{pair[1] / pair[0]:.2f}" if pair else "")
            unit = "tokens/s" if "tokens/s" in published else "seconds"
            pair = seconds_of(row)
            form = {"tokens/s": "{:,}/s", "seconds": "{:.2f} s"}[unit]
            times = [form.format(n[unit]) for n in (published, ours)] if pair else []
            cells += times or ["", ""]
            cells.append(f"{pair[1] / pair[0]:.2f}" if pair else "")
        cells.append(row.get("remark", ""))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def summary(data: dict) -> str:
    """How many figures are near."""
    rows = [row for row in data["rows"] if "ours" in row]
    memory = [pair for pair in map(memory_of, rows) if pair]
    seconds = [pair for pair in map(seconds_of, rows) if pair]
    right = sum(row["published"]["fits"] == row["ours"]["fits"] for row in rows)
    return (
        f"**{len(rows)} runs: memory within 5 % in {_share(memory, 1.05)}, within 10 % "
        f"in {_share(memory, 1.1)}; time within 1.3 in {_share(seconds, 1.3)}; *fits* "
        f"is right in {right} of {len(rows)}.**"
    )


def page(data: dict, text: str) -> str:
    """FIGURES.md, with what stands between its marks written anew."""
    titles = "what, cards, source, GiB published, ours, ratio, time published, ours"
    titles = [*titles.split(", "), "ratio", "remark"]
    table = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *_rows(data)]
    sources = [
        f"* [{source['name']}]({source['address']}), {source['date']}"
        f" ({source['licence']}): {source['measured']}."
        for source in data["sources"].values()
    ]
    left = [row["what"] for row in data["rows"] if "ours" not in row]
    if left:
        table += ["", f"Found, and not repeated yet: {'; '.join(left)}."]
    parts = {"summary": [summary(data)], "table": table, "sources": sources}
    for name, lines in parts.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = before + begin + "\n".join(lines) + end + rest.split(end)[1]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", nargs="+", default=[], metavar="ROW")
    parser.add_argument("--command", metavar="ROW")
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args()
    data = read()
    for row in data["rows"]:
        if row["id"] == args.command:
            words = command(row, Path(tempfile.gettempdir()))
            print(shlex.join(["python", "-m", "simgpu", *words]))
        if row["id"] in args.run or args.run == ["all"]:
            try:
                ours = repeated(row)
            except RuntimeError as error:
                print(error, flush=True)
                continue
            print(row["id"], row["published"], ours, flush=True)
            data = read()  # another of these may have written
            for other in data["rows"]:
                if other["id"] == row["id"]:
                    other["ours"] = ours
            text = json.dumps(data, indent=1, ensure_ascii=False)
            ROWS.write_text(text + "\n", encoding="utf-8")
    if args.page:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(page(read(), text), encoding="utf-8")


if __name__ == "__main__":
    main()
