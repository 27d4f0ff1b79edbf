"""Bytes that go round a ring, and the mistakes that people make about them."""


def sent(ranks: int, nbytes: float) -> float:
    """Bytes that each rank sends in a ring all-reduce of so many bytes.

    Each of two rounds, one to add and one to spread the sums, sends all chunks but one.
    """
    return 2 * (ranks - 1) / ranks * nbytes


def mistakes(ranks: int, nbytes: float) -> dict[float, str]:
    """Number of bytes -> the mistake that leads to it, of float32 in a ring."""
    right = sent(ranks, nbytes)
    return {
        right / 2: "that is the first of two rounds, the reduce-scatter; in a second "
        "one, an all-gather, the complete chunks go round",
        2 * nbytes: f"a rank keeps one chunk in each round: it sends {ranks - 1} of "
        f"{ranks}, not all",
        nbytes: "that is the tensor itself, which a rank hands over once; in a ring of "
        "N it sends 2 (N - 1) / N times as much",
        ranks * right: "that is what all ranks send together, or whole tensors instead "
        "of chunks",
        (ranks - 1) * nbytes: "these are whole tensors; the ring sends chunks, each to "
        "one neighbour",
        nbytes / ranks: "that is one chunk, in one step of 2 (N - 1)",
        2 * right: "it receives as many, but only what it sends is asked for",
        right / 4: "a float32 has 4 bytes",
    }
