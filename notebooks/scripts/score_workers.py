"""Score a data set on all GPUs of a machine, with one process for each GPU.

    python score_workers.py

The images and the scores lie in memory that all processes share, so the queue carries
numbers only. When a worker dies, the others are ended, and the program says which one
it was. Works with any number of GPUs. Used in lesson 14.
"""

import queue
import sys
import time

import torch
import torch.multiprocessing as mp
from torch import nn

PART = 1000  # images that a GPU scores at once
PATIENCE = 100  # seconds without a result: a worker hangs


def make_model():
    torch.manual_seed(0)  # your trained model: torch.load and load_state_dict
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))


def work(rank, workers, images, scores, results):
    torch.cuda.set_device(rank)
    model = make_model().cuda().eval()
    with torch.inference_mode():
        for first in range(rank * PART, len(images), workers * PART):
            part = slice(first, first + PART)
            scores[part] = model(images[part].cuda()).cpu()
            results.put((rank, len(images[part]), torch.cuda.max_memory_allocated()))


def gather(workers, results, total):
    """Wait for all parts; raise an error when a worker has died, or hangs."""
    images, peak = [0] * len(workers), [0] * len(workers)
    heard = time.monotonic()
    while sum(images) < total:
        try:
            rank, count, peak[rank] = results.get(timeout=1)
            images[rank] += count
            heard = time.monotonic()
        except queue.Empty:
            for rank, worker in enumerate(workers):
                if worker.exitcode:  # None: it works; 0: it has done its parts
                    died = f"worker {rank} on cuda:{rank} died: exit code"
                    raise RuntimeError(f"{died} {worker.exitcode}") from None
            if time.monotonic() - heard > PATIENCE:
                raise RuntimeError(f"no result for {PATIENCE} s") from None
    return images, peak


if __name__ == "__main__":
    torch.manual_seed(1)
    images = torch.randn(20_000, 64).share_memory_()  # your data
    labels = images[:, :10].argmax(1)
    scores = torch.empty(len(images), 10).share_memory_()

    context = mp.get_context("spawn")
    results = context.Queue()
    count = torch.cuda.device_count()
    if count == 0:
        sys.exit("no GPU found")
    workers = [
        context.Process(target=work, args=(rank, count, images, scores, results))
        for rank in range(count)
    ]
    for worker in workers:
        worker.start()
    try:
        done, peak = gather(workers, results, len(images))
        for worker in workers:
            worker.join(60)
    except RuntimeError as error:
        sys.exit(str(error))
    finally:
        for worker in workers:
            worker.kill()  # if it has not ended by itself
    for rank in range(count):
        print(f"cuda:{rank}: {done[rank]:,} images, peak {peak[rank] / 2**20:.1f} MiB")
    loss = nn.functional.cross_entropy(scores, labels)
    print(f"{len(images):,} images, loss {loss:.4f}, saved in scores.pt")
    torch.save(scores, "scores.pt")
