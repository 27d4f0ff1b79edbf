"""Set CUDA_VISIBLE_DEVICES in the script itself, and count the GPUs that CUDA gives.

    python set_gpus.py early    # before CUDA is in use
    python set_gpus.py late     # after a mere is_available(), which is a use
    CUDA_VISIBLE_DEVICES=2,3,4 python set_gpus.py shell

For a machine with five GPUs or more, or a simulated one; which cards they are is left
to which_gpus.py. Used in 29-test-the-claims.
"""

import os
import sys

import torch


def main(when: str) -> None:
    if when == "late":
        torch.cuda.is_available()
    if when != "shell":
        os.environ["CUDA_VISIBLE_DEVICES"] = "2,3,4"
    torch.cuda.init()  # before it, device_count() may ask the variable, and not CUDA
    print(torch.cuda.device_count())


if __name__ == "__main__":
    main(*sys.argv[1:])
