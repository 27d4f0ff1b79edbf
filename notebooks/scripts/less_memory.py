"""Train a deep model in less memory, with options that combine.

    python less_memory.py --accumulate 2 --checkpoint

`--accumulate N` cuts each batch into N parts, `--checkpoint` computes activations a
second time, of every block or with `--every 2` of every second one, and `--offload`
moves them to the CPU. `--checkpoint --selective` keeps the results of matmuls and
attention. It saves nothing in the model below: a ReLU keeps its result, which the next
layer needs anyway. With GELU in its place, it does. `--loss-parts N` is for many
classes, such as the words of a language model: the scores are made in N parts.
Each prints the same losses, another peak of memory and another time. (Later norms of
the gradient differ by rounding, and with dropout all do, because the parts of a batch
draw other masks.) BatchNorm refuses `--accumulate`. Used in lesson 10.
"""

import argparse
import contextlib
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


def above_zero(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=above_zero, default=1, metavar="N")
parser.add_argument("--checkpoint", action="store_true")
parser.add_argument("--every", type=above_zero, default=1, metavar="N")
parser.add_argument("--selective", action="store_true")
parser.add_argument("--loss-parts", type=above_zero, default=1, metavar="N")
parser.add_argument("--offload", action="store_true")
options = parser.parse_args()
if (options.every > 1 or options.selective) and not options.checkpoint:
    parser.error("--every and --selective need --checkpoint")
if options.selective and options.offload:
    parser.error("what --selective keeps stays on the GPU: leave out --offload")
torch.manual_seed(0)

# your data: batches, each a dictionary of tensors with the same number of rows
batches = []
for _ in range(5):
    images = torch.randn(8192, 64)
    batches.append({"images": images, "labels": images[:, :10].argmax(1)})


# your model
class Block(nn.Sequential):
    """Four layers; a block may have several inputs, such as masks and positions."""

    def __init__(self, inputs, width):
        layers = []
        for size in (inputs, width, width, width):
            layers += [nn.Linear(size, width), nn.ReLU()]
        super().__init__(*layers)


model = nn.Sequential(*(Block(64 if i == 0 else 128, 128) for i in range(4)))
model.append(nn.Linear(128, 10))
for weight in model.parameters():
    if weight.dim() == 2:
        nn.init.kaiming_normal_(weight)  # or a model this deep does not learn
model = model.cuda()
blocks = model[:4]  # your model's: such as model.model.layers
aten = torch.ops.aten
kept = [  # by --selective: matmuls without and with bias, and attention
    aten.mm.default,
    aten.addmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
]


def loss_of(batch):
    """Your loss: the sum over the samples or tokens, not the mean."""
    return in_parts(loss_of_rows, model[:-1](batch["images"]), batch["labels"])


def loss_of_rows(h, labels):
    """What needs the scores: the last layer and the loss, of some rows."""
    return nn.functional.cross_entropy(model[-1](h), labels, reduction="sum")


def count_of(batch):
    """How many samples or tokens that sum has: -100 marks padding."""
    return (batch["labels"] != -100).sum()


optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

# -- what changes for less memory ------------------------------------------------------
kind = nn.modules.batchnorm._BatchNorm
norms = {each for each in model.modules() if isinstance(each, kind) and each.training}
if norms and options.accumulate > 1:
    parser.error("BatchNorm must see all samples at once: leave out --accumulate")
if options.checkpoint:
    again = partial(checkpoint, use_reentrant=False)
    if options.selective:  # computes all but these operations again
        again.keywords["context_fn"] = partial(
            create_selective_checkpoint_contexts, kept
        )
    for block in blocks[:: options.every]:
        block.forward = partial(again, block.forward)
        for norm in norms & {*block.modules()}:  # counts each batch twice: half each
            norm.momentum = norm.momentum and 1 - (1 - norm.momentum) ** 0.5


def in_parts(loss, *tensors):
    """The sum of the losses of parts of the rows; scores are computed twice.

    Give it (samples, tokens, width) as (rows, width): h.flatten(0, 1).
    """
    if options.loss_parts == 1:
        return loss(*tensors)
    chunks = zip(*(tensor.chunk(options.loss_parts) for tensor in tensors), strict=True)
    return sum(checkpoint(loss, *chunk, use_reentrant=False) for chunk in chunks)


def parts_of(batch, number):
    """Dictionaries with a part of the rows each; the last may have fewer."""
    names = list(batch)
    rows = {
        name: tensor.shape[0] if tensor.dim() else 0 for name, tensor in batch.items()
    }
    if len(set(rows.values())) > 1 or min(rows.values()) < number:
        raise SystemExit(f"{number} parts of {rows} rows: all need as many, and enough")
    chunks = [batch[name].chunk(number) for name in names]
    return [dict(zip(names, part, strict=True)) for part in zip(*chunks, strict=True)]


start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
for step, batch in enumerate(batches):
    if others := [name for name, x in batch.items() if not torch.is_tensor(x)]:
        raise SystemExit(f"not tensors, leave them out of the batches: {others}")
    batch = {name: tensor.cuda() for name, tensor in batch.items()}
    count = count_of(batch)  # of the full batch, not of its parts
    start.record()
    total = 0.0
    for part in parts_of(batch, options.accumulate):
        keep = save_on_cpu(pin_memory=True) if options.offload else None
        with keep or contextlib.nullcontext():
            loss = loss_of(part) / count
        loss.backward()
        total += loss.detach()
    optimizer.step()
    end.record()
    end.synchronize()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients).item()
    ms = start.elapsed_time(end)
    print(f"step {step}: loss {total.item():.4f}, gradient {norm:.4f}, {ms:.1f} ms")
    optimizer.zero_grad()

peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
print(f"peak {peak / 2**20:.1f} MiB, reserved {reserved / 2**20:.1f} MiB")
