"""Print where the memory of a training step goes: `python memory_table.py 1000`.

The argument is the batch size. Put your model, your optimizer and your batch at the
place that is marked. Taken home from lesson 04.
"""

import sys

import torch
from torch import nn

if len(sys.argv) != 2:
    sys.exit("usage: python memory_table.py BATCH_SIZE")
batch_size = int(sys.argv[1])
torch.manual_seed(0)

# -- your model, your optimizer, your batch --------------------------------------------
model = nn.Sequential(
    nn.Linear(64, 1024),
    nn.ReLU(),
    nn.Linear(1024, 1024),
    nn.ReLU(),
    nn.Linear(1024, 10),
).cuda()
optimizer = torch.optim.Adam(model.parameters())
x = torch.randn(batch_size, 64).cuda()
y = x[:, :10].argmax(1)


def loss_of_batch():
    return nn.functional.cross_entropy(model(x), y)


# -- a step, line by line --------------------------------------------------------------
def peak():
    """The highest value since the last call."""
    highest = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return highest


# the first step makes the optimizer's state and the workspaces of the libraries
loss_of_batch().backward()
optimizer.step()
optimizer.zero_grad()

before = torch.cuda.memory_allocated()
peak()
loss = loss_of_batch()
activations = torch.cuda.memory_allocated() - before
peaks = {"peak in forward": peak()}
loss.backward()
peaks["peak in backward"] = peak()
optimizer.step()
peaks["peak in step"] = peak()

# -- the table -------------------------------------------------------------------------
tensors = {
    "parameters and buffers": [*model.parameters(), *model.buffers()],
    "gradients": [p.grad for p in model.parameters() if p.grad is not None],
    "optimizer state": [t for s in optimizer.state.values() for t in s.values()],
    "batch": [x, y],
}
table = {}
for name, found in tensors.items():
    on_gpu = [t for t in found if torch.is_tensor(t) and t.is_cuda]
    table[name] = sum(t.nbytes for t in on_gpu)
table["workspaces, rounding"] = before - (sum(table.values()) - table["gradients"])
table["activations"] = activations
table.update(peaks)
table["reserved by PyTorch"] = torch.cuda.memory_reserved()

print(f"a training step with {batch_size} samples")
for name, nbytes in table.items():
    print(f"{name:24} {nbytes / 2**20:9.2f} MiB")
