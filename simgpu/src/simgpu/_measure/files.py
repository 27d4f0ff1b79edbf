"""The file that `simgpu measure` writes: figures, and the constants fitted to them."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from simgpu import __version__
from simgpu._device import measured
from simgpu._device.cards import Card, card_from
from simgpu._measure import fit


def fitted(data: dict[str, Any]) -> dict[str, Any]:
    """The same figures, with the constants that this simgpu fits to them."""
    rows = {kind: its["rows"] for kind, its in data["recordings"].items()}
    launch, properties = data.get("launch"), data["properties"]
    found = fit.card_of(properties, rows, launch)
    data = {**data, "simgpu": __version__}
    data["like"], data["measured"] = found.like, found.measured
    # of a card that is in no table, links alone are too little
    known = fit.KNOWN[found.like].name == properties["name"]
    if known or launch is not None:
        data["card"] = as_json(found.card)
    network = fit.network_of(found.card, rows.get("nccl_nodes", ()))
    if network is not None:
        data["network"] = network._asdict()
    recordings = data.pop("recordings")  # long: last
    return {**data, "recordings": recordings}


def as_json(card: Card) -> dict[str, Any]:
    """What `card_from` reads."""
    fields = {f.name: getattr(card, f.name) for f in dataclasses.fields(card)}
    fields["capability"] = list(card.capability)
    fields["host"] = None if card.host is None else card.host._asdict()
    return fields


def together(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """What was measured now, and before of other kinds."""
    if before is None:
        return now
    recordings = {**before["recordings"], **now["recordings"]}
    return {**before, **now, "recordings": recordings}


def before(path: Path, hardware: str) -> dict[str, Any] | None:
    """What a file has that is there already; None if it is not there.

    Raises:
        ValueError: if it is another file, or of another card.
    """
    if not path.exists():
        return None
    found = measured.read(path)
    if found["hardware"] != hardware:
        raise ValueError(
            f"{path} is of {found['hardware']}, and this is {hardware}; name another "
            "file"
        )
    return found


def write(path: Path, data: dict[str, Any]) -> None:
    """Write a file; a row of numbers and words stays on one line."""
    text = json.dumps(data, indent=1)
    text = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", _on_one_line, text)
    path.write_text(text + "\n", encoding="utf-8")


def _on_one_line(match: re.Match) -> str:
    return "[" + " ".join(match[1].split()) + "]"


def summary(data: dict[str, Any]) -> str:
    """What was found, for people."""
    lines = [f"{data['hardware']}, fitted like {data['like']}"]
    if "card" in data:
        card = card_from(data["card"])
        lines.append(f"  memory            {card.memory_bandwidth / 1e9:10,.0f} GB/s")
        for dtype, peak in card.flops.items():
            rate = peak * card.reached[dtype] / 1e12
            lines.append(f"  products {dtype:9}{rate:10,.1f} TFLOP/s reached")
        lines.append(f"  PCIe              {card.pcie_bandwidth / 1e9:10,.1f} GB/s")
        lines.append(f"  NVLink            {card.nvlink_bandwidth / 1e9:10,.1f} GB/s")
        if card.host is not None:
            lines.append(f"  a launch          {card.host.launch * 1e6:10,.1f} us")
    if "network" in data:
        network = data["network"]
        lines.append(f"  network           {network['bandwidth'] / 1e9:10,.1f} GB/s")
        lines.append(f"  its latency       {network['latency'] * 1e6:10,.1f} us")
    if data.get("left_out"):
        lines.append(f"  {data['left_out']} figures left out: no time or no memory")
    return "\n".join(lines)
