"""Train a classifier in float32, float16 or bfloat16, and print what it costs.

    python mixed_precision.py --dtype float16

Put your own work into the three functions at the top; a batch may be nested, and hold
strings. float16 needs the scaler, which skips steps whose gradients are not finite. For
the other types it is off: such a step loses the weights, and the program ends within
100 steps. Gradients are clipped to a norm of 1: take another by --clip, or inf for
none. The first epoch warms up and is not timed. At the default size launches bind:
expect 16 bits to be slower, and try --width 8192 --depth 4 on a real GPU. Used in
lesson 09.
"""

import argparse
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.functional import cross_entropy


def make_batches():
    """Your data: batches on the CPU or the GPU, in a list or a DataLoader."""
    images = torch.randn(2048, 64)
    labels = images[:, :10].argmax(1)
    parts = zip(images.split(128), labels.split(128), strict=True)
    return [{"images": x, "labels": y} for x, y in parts]


def make_model(options):
    """Your model, in float32, and your optimizer."""
    layers = [nn.Linear(64, options.width), nn.ReLU()]
    for _ in range(options.depth - 1):
        layers += [nn.Linear(options.width, options.width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(options.width, 10)).cuda()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def loss_of(model, batch):
    """Your loss: `float()`, because a loss of 16-bit scores loses digits."""
    return cross_entropy(model(batch["images"]).float(), batch["labels"])


# --- end of your part ---


def to_gpu(batch):
    """Copies the tensors of a batch: a tensor, or dictionaries, lists and tuples."""
    if isinstance(batch, torch.Tensor):
        return batch.cuda(non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: to_gpu(value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*[to_gpu(value) for value in batch])
    if isinstance(batch, list | tuple):
        return [to_gpu(value) for value in batch]
    return batch


def stop_if_lost(bad, scaler):
    if not scaler.is_enabled() and bad:  # waits for the GPU
        raise SystemExit("a gradient was not finite: the weights are lost")
    if bad and scaler.get_scale() < 1:
        raise SystemExit("no scale helps: the model overflows in float16; use bfloat16")


def asked():
    parser = argparse.ArgumentParser()
    types = ("float32", "float16", "bfloat16")
    parser.add_argument("--dtype", choices=types, default="float16")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--init-scale", type=float, default=2.0**16)
    parser.add_argument("--clip", type=float, default=1.0, help="norm; inf: none")
    options = parser.parse_args()
    for name in ("width", "depth", "init_scale", "clip"):
        if not getattr(options, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    return options


def main():
    options = asked()
    dtype = getattr(torch, options.dtype)
    torch.manual_seed(0)
    batches = make_batches()
    model, optimizer = make_model(options)
    for name, parameter in model.named_parameters():
        if parameter.dtype in (torch.float16, torch.bfloat16):
            raise SystemExit(
                f"{name} is {parameter.dtype}: its small updates would be lost. Load "
                "the model in float32; autocast makes the 16-bit copies"
            )

    mixed = dtype != torch.float32
    scaler = torch.amp.GradScaler(
        "cuda", init_scale=options.init_scale, enabled=dtype == torch.float16
    )
    torch.cuda.reset_peak_memory_stats()
    steps = 0
    bad = torch.zeros((), device="cuda")  # steps with gradients that are not finite
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    for epoch in range(3):
        if epoch == 1:  # the first epoch loads kernels
            start.record()
        before = steps
        for batch in batches:
            with torch.amp.autocast("cuda", dtype=dtype, enabled=mixed):
                loss = loss_of(model, to_gpu(batch))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)  # clipping needs the real gradients
            norm = nn.utils.clip_grad_norm_(model.parameters(), options.clip)
            scaler.step(optimizer)  # waits for the GPU, unless the optimizer is fused
            scaler.update()
            optimizer.zero_grad()
            bad += ~norm.isfinite()  # counted on the GPU: .item() would wait, too
            steps += 1
            if steps % 100 == 0:
                stop_if_lost(bad, scaler)
        if steps == before:
            raise SystemExit("no batch: give a list or a DataLoader, not a generator")
        print(f"epoch {epoch}: loss {loss.item():.4f}")
        stop_if_lost(bad, scaler)
    end.record()
    end.synchronize()
    milliseconds = start.elapsed_time(end) / (2 * (steps - before))

    peak = torch.cuda.max_memory_allocated() / 2**20
    print(f"{options.dtype}: {bad.item():.0f} of {steps} steps skipped")
    print(f"peak memory {peak:.1f} MiB, {milliseconds:.2f} ms a step")


if __name__ == "__main__":  # not in the workers of a DataLoader
    main()
