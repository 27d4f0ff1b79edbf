"""Train from a DataLoader, and say how long a step waits for its data.

    python feed_loop.py --workers 2

Prints for each epoch the loss, how long the loop waited for a batch, how long the GPU
computed, and how long it was idle between two steps. If the GPU is idle, and the loop
waits about as long, add workers. A loop that waits while the GPU is busy is all right.
Epoch 0 also waits for the start of the workers. With `--workers 0`, the loop waits as
long as loading a batch takes. (A simulated GPU does not see your loader's time.)
Used in lesson 11.
"""

import argparse
import time
from itertools import pairwise

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler


class Images(Dataset):
    """Your data go here: item i is read, decoded and returned as CPU tensors."""

    def __init__(self, milliseconds: float):
        self.seconds = milliseconds / 1e3
        self.x = torch.randn(2048, 64, generator=torch.Generator().manual_seed(0))
        self.y = self.x[:, :10].argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.seconds)  # stands for a disk
        return self.x[i], self.y[i]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--load-ms", type=float, default=0.1, help="of an item")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ahead = {}
    if args.workers:  # without workers, DataLoader refuses these two
        # Persistent workers keep the data set as it was when they started.
        ahead = {"persistent_workers": True, "prefetch_factor": 2}
    data = Images(args.load_ms)
    order = torch.Generator().manual_seed(0)  # its own: no worker draws from it
    loader = DataLoader(
        data,
        batch_size=128,
        sampler=RandomSampler(data, generator=order),
        num_workers=args.workers,
        pin_memory=True,
        **ahead,
    )
    for epoch in range(3):
        waited, steps = 0.0, []
        before = time.perf_counter()
        for x, y in loader:
            waited += time.perf_counter() - before
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            end.record()
            steps.append((begin, end))
            before = time.perf_counter()
        torch.cuda.synchronize()  # the events are read once an epoch
        computed = sum(begin.elapsed_time(end) for begin, end in steps)
        gaps = [a[1].elapsed_time(b[0]) for a, b in pairwise(steps)]
        idle = sum(gaps)  # from the end of a step to the begin of the next, on the GPU
        times = f"waited {1e3 * waited / len(steps):.2f} ms a step"
        times += f", computed {computed / len(steps):.2f} ms"
        times += f", GPU idle {idle / (len(steps) - 1):.2f} ms"
        print(f"epoch {epoch}: loss {loss.item():.4f}, {times}")


if __name__ == "__main__":
    main()
