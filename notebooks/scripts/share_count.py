"""Send a tensor on a GPU to another process, and count the memory at each moment.

    python share_count.py

Used in lesson 14.
"""

import torch
import torch.multiprocessing as mp


def hold(inbox, outbox):
    x = inbox.get(timeout=60)
    outbox.put(torch.cuda.memory_allocated())  # while it has x
    inbox.get(timeout=60)  # "let go"
    del x
    outbox.put("done")


def show(when):
    """What the sender's allocator has, and what the card has in use."""
    free, total = torch.cuda.mem_get_info()
    sender, card = torch.cuda.memory_allocated() >> 20, (total - free) >> 20
    print(f"{when:20} sender {sender:2} MiB, card {card:5,} MiB")


if __name__ == "__main__":
    context = mp.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    worker = context.Process(target=hold, args=(inbox, outbox), daemon=True)
    worker.start()
    x = torch.zeros(12 * 2**20, device="cuda")  # 48 MiB
    show("before put")
    inbox.put(x)
    print(f"the worker's allocator: {outbox.get(timeout=60)} bytes")
    show("the worker has x")
    del x
    torch.cuda.ipc_collect()
    show("the sender: del x")
    inbox.put("let go")
    outbox.get(timeout=60)
    torch.cuda.ipc_collect()
    show("the worker: del x")
    worker.join(60)
