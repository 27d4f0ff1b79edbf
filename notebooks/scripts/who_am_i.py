"""Print what torchrun tells a process, in one line: its rank, its node and its GPU.

    torchrun --standalone --nproc-per-node=2 who_am_i.py

Used in lesson 25.
"""

import os
import sys

NAMES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR")

if __name__ == "__main__":
    words = [f"{name}={os.environ[name]}" for name in NAMES]
    sys.stdout.write(" ".join(words) + "\n")  # at once: others write here, too
