"""Make one ordinary file of a checkpoint, however many ranks wrote it.

    python export.py saved/step-000030 model.pt

`torch.load` reads the file, and `--weights=model.pt` of a trainer. Needs no GPU.
"""

import sys

import torch
import torch.distributed.checkpoint as dcp


def weights_of(folder):
    """Name -> full tensor, in host memory."""
    about = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    weights = {
        name.removeprefix("model."): torch.empty(what.size, dtype=what.properties.dtype)
        for name, what in about.items()
        if name.startswith("model.") and hasattr(what, "size")
    }
    dcp.load({"model": weights}, checkpoint_id=folder, no_dist=True)
    return weights


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("python export.py FOLDER FILE")
    torch.save(weights_of(sys.argv[1]), sys.argv[2])
