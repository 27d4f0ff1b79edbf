"""Streams for tests of the simulator: the current one, and a second one beside it."""

import torch


def main_stream() -> torch.cuda.Stream:
    """The current stream of the current GPU."""
    return torch.cuda.current_stream()


def side_stream(device=None) -> torch.cuda.Stream:
    """A new stream, which has waited for the current one of its GPU."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    return side
