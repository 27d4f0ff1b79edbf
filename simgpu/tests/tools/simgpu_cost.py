"""What the simulator costs: microseconds an operation, milliseconds a training step.

    python tests/tools/simgpu_cost.py

Prints the cost of one operation without the simulator, with it, and under PyTorch's
own FakeTensorMode, and a training step with and without it, all in one run. A
benchmark, not a test: nothing is asserted, every figure is this machine's.
"""

import argparse
import os
import platform
import statistics
import time

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import simgpu


def microseconds(call, times: int = 3000, rounds: int = 7) -> float:
    """The median over rounds of the mean time of `call`."""
    means = []
    for _ in range(rounds + 1):  # the first warms up
        start = time.perf_counter()
        for _ in range(times):
            call()
        means.append((time.perf_counter() - start) / times * 1e6)
    return statistics.median(means[1:])


def operations(make) -> dict[str, float]:
    """Microseconds of a few operations on 8 x 8 matrices from `make()`."""
    a, b = make(), make()
    return {
        "a + b": microseconds(lambda: a + b),
        "a @ b": microseconds(lambda: a @ b),
        "a.t()": microseconds(a.t),
        "a.add_(b)": microseconds(lambda: a.add_(b)),
    }


def training_step(device: str):
    """One SGD step of an MLP of 4 layers, batch 256, width 1024."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(256, 1024).to(device)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def main() -> None:
    argparse.ArgumentParser(description="What the simulator costs.").parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    results = {"plain CPU": operations(lambda: torch.ones(8, 8))}
    with FakeTensorMode():
        results["FakeTensorMode"] = operations(lambda: torch.ones(8, 8))
    plain = training_step("cpu")
    simgpu.start(2)
    results["CPU tensor, simulator on"] = operations(lambda: torch.ones(8, 8))
    results["simulated GPU"] = operations(lambda: torch.ones(8, 8, device="cuda"))
    simgpu.stop()

    names = list(results["plain CPU"])
    print(f"\n{'µs an operation':26}" + "".join(f"{name:>12}" for name in names))
    for how, row in results.items():
        print(f"{how:26}" + "".join(f"{row[name]:12.1f}" for name in names))

    times: dict[str, list[float]] = {"plain CPU": [], "simulated GPU": []}
    for _ in range(12):  # in turn, so that both meet the same weather
        times["plain CPU"].append(microseconds(plain, 1, 1) / 1e3)
        simgpu.start(2)
        simulated = training_step("cuda:1")
        times["simulated GPU"].append(microseconds(simulated, 1, 1) / 1e3)
        simgpu.stop()
    best = {how: statistics.median(row) for how, row in times.items()}
    print("\nms a training step (4 layers, batch 256, width 1024)")
    for how, value in best.items():
        print(f"{how:26}{value:12.1f}{value / best['plain CPU']:8.2f} x")


if __name__ == "__main__":
    main()
