"""Train from a DataLoader, and say how long a step waits for its data.

    python feed_loop.py --workers 2
    torchrun --nproc-per-node 8 feed_loop.py --workers 2

Prints for each epoch the loss and, for a step: how long the loop waited for a batch;
how long the step took on the GPU, from its first event to its last, with copies,
kernels and the gaps between launches; and how long the GPU was idle until the next
step. If the GPU is idle, and the loop waits about as long, add workers. A loop that
waits while the GPU is busy is all right. Epoch 0 also waits for the start of the
workers. With `--workers 0`, the loop waits as long as loading a batch takes. With
`--one-batch`, it trains on one batch, repeated: what is faster then, the loader cost.

Several ranks: rank 0 prints the longest wait of all ranks and which rank it was, since
the others wait for that one in their all-reduce. A simulated GPU does not see your
loader's time, and counts no idle time. Used in lesson 11.
"""

import argparse
import os
import time
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler


class Images(Dataset):
    """Your data here: item i is read, decoded and returned, as CPU tensors."""

    def __init__(self, milliseconds: float):
        self.seconds = milliseconds / 1e3
        self.x = torch.randn(2048, 64, generator=torch.Generator().manual_seed(0))
        self.y = self.x[:, :10].argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        time.sleep(self.seconds)  # stands for a disk
        return {"images": self.x[i], "labels": self.y[i]}


def pad(items):
    """Texts of several lengths as one batch, and a mask: True where there is text.

    Leaves out what else an item has.
    """
    texts = [item["tokens"] for item in items]
    lengths = torch.tensor([len(text) for text in texts])
    tokens = pad_sequence(texts, batch_first=True)  # fills up with 0
    mask = torch.arange(tokens.shape[1]) < lengths[:, None]
    return {"tokens": tokens, "mask": mask}


def seed_own(worker: int) -> None:
    """Seeds NumPy generators that are attributes of your data set, in a worker.

    Also those of its `transform`, and of data sets inside a Subset or ConcatDataset.
    Each worker would draw the same numbers. What `random`, `np.random` and `torch` draw
    is seeded by the loader.
    """
    info = torch.utils.data.get_worker_info()
    seeds, inside = np.random.SeedSequence(info.seed), [info.dataset]
    for data in inside:  # which grows meanwhile
        for name, value in getattr(data, "__dict__", {}).items():
            if isinstance(value, np.random.Generator):
                setattr(data, name, np.random.default_rng(seeds.spawn(1)[0]))
        parts = [getattr(data, name, None) for name in ("dataset", "transform")]
        inside += [part for part in parts if part is not None]
        inside += getattr(data, "datasets", [])


def make_model() -> nn.Module:  # your model
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Your loss here."""
    return nn.functional.cross_entropy(model(batch["images"]), batch["labels"])


def to_gpu(batch):
    """Copies a batch: what has a `to`, or dictionaries, lists and tuples of it."""
    if isinstance(batch, Mapping):
        return {name: to_gpu(value) for name, value in batch.items()}
    if hasattr(batch, "to"):
        return batch.to("cuda", non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*[to_gpu(value) for value in batch])
    if isinstance(batch, list | tuple):
        return [to_gpu(value) for value in batch]
    return batch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--load-ms", type=float, default=0.1, help="of an item")
    parser.add_argument("--one-batch", action="store_true", help="repeat the first one")
    args = parser.parse_args()
    if args.workers < 0:
        parser.error(f"--workers is 0 or more, not {args.workers}")
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)

    torch.manual_seed(0)
    model = make_model().cuda()
    if ranks > 1:
        dist.init_process_group("nccl", device_id=device)
        model = nn.parallel.DistributedDataParallel(model, device_ids=[device])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # your optimizer
    ahead = {}
    if args.workers:  # without workers, DataLoader refuses these two
        # Persistent workers keep the data set as it was when they started.
        ahead = {"persistent_workers": True, "prefetch_factor": 2}
    data = Images(args.load_ms)
    order = torch.Generator().manual_seed(0)  # its own: no worker draws from it
    if isinstance(data, torch.utils.data.IterableDataset):
        sampler = None  # its workers share the items out, over all ranks
    elif ranks > 1:
        sampler = DistributedSampler(data)
    else:
        sampler = RandomSampler(data, generator=order)
    loader = DataLoader(
        data,
        batch_size=128,
        sampler=sampler,
        num_workers=args.workers,
        pin_memory=True,
        collate_fn=None,  # `pad`, if samples have several lengths
        generator=torch.Generator().manual_seed(rank),  # of the workers' seeds
        worker_init_fn=seed_own,
        **ahead,
    )
    batches = loader
    if args.one_batch:
        has_length = sampler is not None or hasattr(data, "__len__")
        batches = [next(iter(loader))] * (len(loader) if has_length else 50)
    simulated = "simulated" in torch.cuda.get_device_name()
    for epoch in range(3):
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
        waited, steps = 0.0, []
        before = time.perf_counter()
        for batch in batches:
            waited += time.perf_counter() - before
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            loss = loss_of(model, to_gpu(batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            end.record()
            steps.append((begin, end))
            before = time.perf_counter()
        if not steps:
            raise SystemExit(f"rank {rank}: no batch; are there enough items, shards?")
        torch.cuda.synchronize()  # the events are read once an epoch
        on_gpu = sum(begin.elapsed_time(end) for begin, end in steps) / len(steps)
        gaps = [a[1].elapsed_time(b[0]) for a, b in pairwise(steps)]
        waits = torch.zeros(ranks, device="cuda")
        waits[rank] = 1e3 * waited / len(steps)
        if ranks > 1:
            dist.all_reduce(waits)  # each rank adds its own
        if rank == 0:
            times = f"waited {waits[0]:.2f} ms a step, on the GPU {on_gpu:.2f} ms"
            idle = f", then idle {sum(gaps) / max(1, len(gaps)):.2f} ms"
            times += ", idle: not counted here" if simulated else idle
            if ranks > 1:
                times += f"; longest wait {waits.max():.2f} ms, rank {waits.argmax()}"
            print(f"epoch {epoch}: loss {loss.item():.4f}, {times}")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
