"""Print where the memory of a training step goes: `python memory_table.py 1000`.

The argument is the batch size. Put your model, your optimizer and your batch at the
places that are marked. A batch may be a tensor, a list or a dictionary of them, or of a
class with a method `to`. Then comes what autograd keeps of each kind of module, the
largest first. "(model)" is what the `forward` of your model computes itself, and
"layers.*.mlp" all modules "layers.0.mlp", "layers.1.mlp" and so on. Used in lesson 04.
"""

import re
import sys
from collections.abc import Mapping

import torch
from torch import nn

if len(sys.argv) != 2 or not sys.argv[1].isdigit() or int(sys.argv[1]) < 1:
    sys.exit("usage: python memory_table.py BATCH_SIZE, a whole number above 0")
batch_size = int(sys.argv[1])
torch.manual_seed(0)

# -- your model, your optimizer --------------------------------------------------------
model = nn.Sequential(
    nn.Linear(64, 1024),
    nn.ReLU(),
    nn.Linear(1024, 1024),
    nn.ReLU(),
    nn.Linear(1024, 10),
).cuda()
optimizer = torch.optim.Adam(model.parameters())

# -- your data, your loss --------------------------------------------------------------
images = torch.randn(batch_size, 64)
batch = {"images": images, "labels": images[:, :10].argmax(1)}


def loss_of(batch):
    return nn.functional.cross_entropy(model(batch["images"]), batch["labels"])


# -- a step, line by line --------------------------------------------------------------
def tensors_in(value):
    """All tensors in lists, tuples and dictionaries."""
    if torch.is_tensor(value):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    elif hasattr(value, "to"):  # a class of your own
        value = list(vars(value).values())
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in tensors_in(part)]
    return []


def to_gpu(value):
    if torch.is_tensor(value):
        return value.cuda()
    if isinstance(value, Mapping):
        return {name: to_gpu(part) for name, part in value.items()}
    if hasattr(value, "to"):  # a class of your own
        return value.to("cuda")
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*[to_gpu(part) for part in value])
    if isinstance(value, (list, tuple)):
        return [to_gpu(part) for part in value]
    return value


def peak():
    """The highest value since the last call."""
    highest = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return highest


# the first step makes the optimizer's state and the workspaces of the libraries
try:
    batch = to_gpu(batch)
    for _ in range(2):  # the second step has them from its beginning
        loss_of(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
except torch.OutOfMemoryError as error:
    sys.exit(f"a batch of {batch_size} does not fit, try a smaller one: {error}")

before = torch.cuda.memory_allocated()
peak()
loss = loss_of(batch)
activations = torch.cuda.memory_allocated() - before
peaks = {"peak in forward": peak()}
loss.backward()
peaks["peak in backward"] = peak()
optimizer.step()
peaks["peak in step"] = peak()
torch.cuda.synchronize()  # what a kernel has refused is an error here
gradients = [p.grad for p in model.parameters() if p.grad is not None]

# -- the table -------------------------------------------------------------------------
parts = {
    "parameters and buffers": [*model.parameters(), *model.buffers()],
    "gradients": gradients,
    "optimizer state": tensors_in(list(optimizer.state.values())),
    "batch": tensors_in(batch),
}
table = {}
for name, found in parts.items():
    storages = [t.untyped_storage() for t in found if t.is_cuda]
    table[name] = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
table["workspaces, others"] = before - (sum(table.values()) - table["gradients"])
table["activations"] = activations
table.update(peaks)
table["reserved by PyTorch"] = torch.cuda.memory_reserved()
table["memory of the card"] = torch.cuda.mem_get_info()[1]

print(f"a training step with {batch_size} samples")
for name, nbytes in table.items():
    print(f"{name:24} {nbytes / 2**20:9.2f} MiB")

# -- what autograd keeps, module by module ---------------------------------------------
optimizer.zero_grad()


def row_of(name):
    """The row of a module: "layers.3.mlp" is in the row "layers.*.mlp"."""
    return re.sub(r"\b\d+\b", "*", name) if "." in name else name or "(model)"


classes, names = {}, {}
for name, module in model.named_modules():
    classes.setdefault(row_of(name), set()).add(type(module).__name__)
for name, module in model.named_modules():
    row = row_of(name)  # unlike modules have a row for each class
    names[module] = f"{row} ({type(module).__name__})" if len(classes[row]) > 1 else row
known = {t.untyped_storage().data_ptr() for t in parts["parameters and buffers"]}
known |= {t.untyped_storage().data_ptr() for t in parts["batch"]}
running, kept = ["(loss)"], {}


def enter(module, inputs):
    running.append(names[module])


def leave(module, inputs, output):
    running.pop()


def keep(tensor):
    """Notes a tensor once, with the module that runs."""
    address = tensor.untyped_storage().data_ptr()
    if tensor.is_cuda and address not in known:
        kept.setdefault(address, (running[-1], tensor))
    return tensor


for module in names:
    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)
with torch.autograd.graph.saved_tensors_hooks(keep, keep):
    loss = loss_of(batch)

modules = {}
for name, tensor in kept.values():
    size = tensor.untyped_storage().nbytes()
    modules[name] = modules.get(name, 0) + size
rows = dict(sorted(modules.items(), key=lambda row: -row[1])[:10])
rows["others"] = activations - sum(rows.values())
print("activations, the largest ten kinds of modules")
for name, nbytes in rows.items():
    print(f"  {name:30} {nbytes / 2**20:9.2f} MiB")
