"""Send a tensor on a GPU to another process, which adds one to it.

    python share_one.py

The tensor does not travel: both processes use the same memory of the GPU. Used in
lesson 14.
"""

import torch
import torch.multiprocessing as mp


def add_one(queue):
    x = queue.get(timeout=60)
    x += 1
    torch.cuda.synchronize()


if __name__ == "__main__":
    mp.set_start_method("spawn")
    queue = mp.Queue()
    worker = mp.Process(target=add_one, args=(queue,))
    worker.start()
    x = torch.zeros(3, device="cuda")
    queue.put(x)
    worker.join(60)
    print(x)
