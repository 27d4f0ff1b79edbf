"""Runs a trainer whose rank 1 gets a signal in the middle of a step. Lesson 28.

    torchrun --nproc-per-node=2 --max-restarts=1 kill_trainer.py fsdp.py --data=…

A signal from outside would hit another step on a slow machine. SIGKILL is what the
system sends that has run out of memory. SIGTERM is what a cluster sends that wants its
machines back: to torchrun, which passes it on to all ranks.
"""

import os
import runpy
import signal
import sys
import time

from torch.optim.optimizer import register_optimizer_step_pre_hook

# restarts so far -> the signal, and in which step of this start it comes
SIGNALS = {
    "0": (signal.SIGKILL, 4),
    "1": (signal.SIGTERM, 3),
}


class Signal:
    """Counts the optimizer's steps, and sends the signal in one of them."""

    def __init__(self, number, step):
        self.number, self.left = number, step

    def __call__(self, optimizer, *_):
        if optimizer.param_groups[0]["lr"] == 0:
            return  # to have a state to load, PyTorch steps once at this rate
        self.left -= 1
        if self.left == 0:
            send(self.number)


def send(number):
    if number == signal.SIGKILL:
        os.kill(os.getpid(), number)
        return
    handler, came = signal.getsignal(number), []
    signal.signal(number, lambda *about: (came.append(number), handler(*about)))
    os.kill(os.getppid(), number)
    end = time.monotonic() + 60
    while not came:  # the step must not end before torchrun has passed it on
        if time.monotonic() > end:
            raise TimeoutError("torchrun has not passed the signal on for 60 s")
        time.sleep(0.01)


if __name__ == "__main__":
    which = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if os.environ["RANK"] == "1" and which in SIGNALS:
        register_optimizer_step_pre_hook(Signal(*SIGNALS[which]))
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
