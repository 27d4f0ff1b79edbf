"""Runs train_gpt.py, but rank 1 is killed: after step 2, and after a restart step 4.

    torchrun --nproc-per-node=2 --max-restarts=1 kill_gpt.py --text=book.txt …

A kill from outside would hit another step on a slow machine. The signal is SIGKILL, as
when the machine runs out of memory. Used in lesson 27.
"""

import json
import os
import signal

import torch
import torch.distributed as dist
import train_gpt
from torch.distributed.elastic.multiprocessing.errors import record

LAST_STEP = {"0": 2, "1": 4}  # restarts so far -> the step after which rank 1 dies


@record
def main():
    args = train_gpt.options()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    last = LAST_STEP.get(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for line in train_gpt.train(args):
        if dist.get_rank() == 0:
            print(json.dumps(line), flush=True)
        if line["step"] == last:
            dist.barrier()  # rank 0 has noted the step
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
