"""The private names of PyTorch that tracking needs, in one place.

PyTorch may rename or drop such names in any release; then `load` says which are gone,
and only this file has to follow.
"""

import importlib

# name: its module; all are there in torch 2.11 and 2.13
NAMES = {
    "FakeTensorMode": "torch._subclasses.fake_tensor",
    "FakeStore": "torch.testing._internal.distributed.fake_pg",
    "FSDPMemTracker": "torch.distributed._tools.fsdp2_mem_tracker",
}


def load(name: str):
    """The private class of that name.

    Raises:
        ImportError: if this PyTorch does not have it; the message says where it was.
    """
    import torch

    try:
        return getattr(importlib.import_module(NAMES[name]), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"PyTorch {torch.__version__} has no {NAMES[name]}.{name}, a private name "
            "that this course uses; it was there in 2.11 and 2.13. "
            "Tell notebooks/scripts/plan/torch_private.py where it went"
        ) from error


def fake_tensors():
    """A context in which tensors have shapes and no memory: FakeTensorMode."""
    return load("FakeTensorMode")(allow_non_fake_inputs=True)


def fake_group(ranks: int) -> None:
    """Make this process rank 0 of `ranks`, of which no other exists.

    Collectives return at once with values that mean nothing.
    """
    import torch.distributed as dist

    load("FakeStore")  # importing it registers the backend "fake"
    store = load("FakeStore")()
    dist.init_process_group("fake", rank=0, world_size=ranks, store=store)


class Peaks:
    """The most bytes alive at once, from one mark to the next.

    Args:
        model: sharded by `fully_shard`.
        optimizer: of its parameters.
        inputs: tensors that are there already.

    Used as a context around training; `moments` has a dict for each mark: bytes by
    the kind that `FSDPMemTracker` gives them, at the instant of the peak.
    """

    def __init__(self, model, optimizer, inputs: tuple):
        self.tracker = load("FSDPMemTracker")(model, optimizer)
        self.tracker.track_inputs(inputs)
        self.moments: dict[str, dict[str, int]] = {}

    def __enter__(self):
        self.tracker.__enter__()
        return self

    def __exit__(self, *error):
        self.tracker.__exit__(*error)

    def mark(self, moment: str) -> None:
        """End a moment: keep its peak, and let the next begin."""
        (peak,) = self.tracker.get_tracker_snapshot("peak").values()
        # a kind of memory is a member of an enumeration, but for the text "Total"
        self.moments[moment] = {
            getattr(kind, "name", kind): nbytes for kind, nbytes in peak.items()
        }
        self.tracker._peak_mem.clear()  # private as well: peaks start anew
