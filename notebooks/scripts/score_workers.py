"""Score a data set on all GPUs of a machine, with one process for each GPU.

    python score_workers.py

Each process reads its own part of the data batch by batch, so the data need not fit
into one tensor. The scores lie in memory that all processes share, and the queue
carries counts only. When a worker dies, the others are ended, and the program says
which one it was. Works with any number of GPUs. Used in lesson 14.
"""

import os
import queue
import signal
import sys
import time
from collections.abc import Mapping

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

BATCH = 1000  # yours: samples that a GPU scores at once
LOADERS = 0  # more processes that read samples, for each GPU; for files, 4
WIDTH = 10  # yours: scores of a sample
PATIENCE = 300  # seconds without a result: a worker hangs


class Data(Dataset):
    """Your data: each process opens it, and reads a sample when it needs it."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(20_000, 64, generator=generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        return {"image": self.images[number], "name": f"image {number}"}


def make_model():
    torch.manual_seed(0)  # your model: torch.load and load_state_dict
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, WIDTH))


def score(model, batch):
    # Your model: for example `batch.pop("name")`, because a model takes no texts, and
    # then `return model(**batch).logits`.
    return model(batch["image"])


def to_gpu(batch):
    """The batch with its tensors on the current GPU: a tensor, dictionary, list."""
    if isinstance(batch, torch.Tensor):
        return batch.cuda(non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: to_gpu(value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*[to_gpu(value) for value in batch])
    if isinstance(batch, (list, tuple)):
        return [to_gpu(value) for value in batch]
    return batch  # a text, for example


def work(rank, workers, scores, results):
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # one signal ends this process and those that read for it
    torch.cuda.set_device(rank)
    model = make_model().cuda().eval()
    first, last = (len(scores) * end // workers for end in (rank, rank + 1))
    part = Subset(Data(), range(first, last))
    loader = DataLoader(
        part,
        BATCH,
        collate_fn=None,  # your padding
        num_workers=LOADERS,
        pin_memory=True,
        multiprocessing_context="fork" if LOADERS else None,  # starts at once
    )
    with torch.inference_mode():
        for batch in loader:
            found = score(model, to_gpu(batch)).float().cpu()
            if found.ndim != 2 or found.shape[1] != WIDTH:
                shape = f"{tuple(found.shape)}, not (samples, {WIDTH})"
                raise ValueError(f"scores of shape {shape}: change WIDTH, or score()")
            if first + len(found) > last:
                raise ValueError("score() returns more rows than there are samples")
            scores[first : first + len(found)] = found
            first += len(found)
            results.put((rank, len(found), torch.cuda.max_memory_allocated()))
    if first < last:
        raise ValueError(f"score() has left out {last - first} samples")


def end(worker):
    """Kill a worker, if it has not ended by itself, and what reads for it."""
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except (AttributeError, ProcessLookupError):  # no groups here, or none left
        worker.kill()


def gather(workers, results, total):
    """Wait for all parts; raise an error when a worker has died, or hangs."""
    counts, peak = [0] * len(workers), [0] * len(workers)
    heard = time.monotonic()
    while sum(counts) < total:
        try:
            rank, count, peak[rank] = results.get(timeout=1)
            counts[rank] += count
            heard = time.monotonic()
        except queue.Empty:
            for rank, worker in enumerate(workers):
                if worker.exitcode:  # None: it works; 0: it has done its part
                    died = f"worker {rank} on cuda:{rank} died: exit code"
                    raise RuntimeError(f"{died} {worker.exitcode}") from None
            if time.monotonic() - heard > PATIENCE:
                why = "a worker hangs, or PATIENCE is too short"
                raise RuntimeError(f"no result for {PATIENCE} s: {why}") from None
    return counts, peak


def number_of_samples(data):
    """The length of the data; ends the program if it is no data set of this kind."""
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        sys.exit(f"{type(data).__name__} needs a length, and samples with numbers")
    if len(data) == 0:
        sys.exit(f"{type(data).__name__} is empty")
    return len(data)


if __name__ == "__main__":
    total, gpus = number_of_samples(Data()), torch.cuda.device_count()
    if gpus == 0:
        sys.exit("no GPU found")
    scores = torch.empty(total, WIDTH).share_memory_()
    context = mp.get_context("spawn")
    results = context.Queue()
    workers = [
        context.Process(target=work, args=(rank, gpus, scores, results))
        for rank in range(gpus)
    ]
    for worker in workers:
        worker.start()
    try:
        counts, peak = gather(workers, results, total)
        for worker in workers:
            worker.join(60)
    except RuntimeError as error:
        sys.exit(str(error))
    finally:
        for worker in workers:
            end(worker)
    for rank in range(gpus):
        mib = peak[rank] / 2**20
        print(f"cuda:{rank}: {counts[rank]:,} samples, peak {mib:.1f} MiB")
    torch.save(scores, "scores.pt")
    print(f"{total:,} samples scored, saved in scores.pt")
