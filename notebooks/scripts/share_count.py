"""Count what sending a tensor on a GPU costs: bytes through the pipe, bytes on the GPU.

    python share_count.py

Used in lesson 14.
"""

import pickle
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing as mp


def receive(pipe):
    for _ in range(2):
        assert pipe.poll(60), "nothing arrives"
        x = pickle.loads(pipe.recv_bytes())
        pipe.send(torch.cuda.memory_allocated())  # while it has x
        assert pipe.poll(60) and pipe.recv() == "let go"
        del x
        pipe.send("done")


def told(pipe):
    assert pipe.poll(60), "the worker says nothing"
    return pipe.recv()


if __name__ == "__main__":
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    worker = context.Process(target=receive, args=(theirs,), daemon=True)
    worker.start()
    for elements in (1_000, 12_500_000):
        x = torch.zeros(elements, device="cuda")
        handle = ForkingPickler.dumps(x)  # what queue.put(x) writes into its pipe
        pipe.send_bytes(handle)
        print(f"{x.nbytes:,} bytes of values, under 1 kB sent: {len(handle) < 1000}")
        print(f"  worker: {told(pipe):,} bytes allocated")
        print(f"  sender: {torch.cuda.memory_allocated():,} bytes allocated")
        del x
        torch.cuda.ipc_collect()
        print(f"  sender after del x: {torch.cuda.memory_allocated():,} bytes")
        pipe.send("let go")
        told(pipe)
        torch.cuda.ipc_collect()
        print(f"  sender after both: {torch.cuda.memory_allocated():,} bytes")
    worker.join(60)
