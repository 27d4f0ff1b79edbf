"""Train on all GPUs of one machine from one process: `python split_batch.py`.

`nn.DataParallel` splits each batch over the GPUs. Before the training, loss and
gradients are compared with those of one GPU. At the end, the script prints what each
GPU holds, and what to change for DDP. Put your own model and data between the two lines
of dashes; leave the comparison out if the model has dropout or BatchNorm, which differ
from part to part. Used in lesson 12.
"""

import torch
from torch import nn

# -- your model and your data ----------------------------------------------------------
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
images = torch.randn(1024, 64)
labels = images[:, :10].argmax(1)
batch_size = 128
# --------------------------------------------------------------------------------------

TO_DDP = """For DDP, as in four_gpus.py:
  start a process for each GPU: torchrun --standalone --nproc-per-node=4
  take a GPU by LOCAL_RANK, set_device, init_process_group("nccl")
  DDP(model, device_ids=[local_rank]) in the place of nn.DataParallel
  DistributedSampler with set_epoch; batch_size // world_size for each rank
  rank 0 prints and saves"""

gpus = list(range(torch.cuda.device_count()))
first = torch.device("cuda", gpus[0])
model = model.to(first)  # before nn.DataParallel: the weights must be on device_ids[0]
parallel = nn.DataParallel(model, device_ids=gpus)


def loss_and_gradients(net, x, y):
    loss = nn.functional.cross_entropy(net(x), y)
    return loss, torch.autograd.grad(loss, list(model.parameters()))


x, y = images[:batch_size].to(first), labels[:batch_size].to(first)
loss_of_one, gradients_of_one = loss_and_gradients(model, x, y)
loss_of_all, gradients_of_all = loss_and_gradients(parallel, x, y)
torch.testing.assert_close(loss_of_all, loss_of_one, rtol=1e-4, atol=1e-5)
torch.testing.assert_close(gradients_of_all, gradients_of_one, rtol=1e-4, atol=1e-5)
print(
    f"first batch: loss {loss_of_one:.4f} on one GPU, {loss_of_all:.4f} on {len(gpus)}"
)
print(f"{len(gradients_of_one)} gradients agree")
del loss_of_one, loss_of_all, gradients_of_one, gradients_of_all

optimizer = torch.optim.Adam(model.parameters())
for epoch in range(3):
    for x, y in zip(images.split(batch_size), labels.split(batch_size), strict=True):
        loss = nn.functional.cross_entropy(parallel(x), y.to(first))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")

for gpu in gpus:
    now = torch.cuda.memory_allocated(gpu) / 2**20
    peak = torch.cuda.max_memory_allocated(gpu) / 2**20
    print(f"cuda:{gpu} holds {now:.1f} MiB, at most {peak:.1f} MiB")
torch.save(model.state_dict(), "model.pt")  # the model's own: names without `module.`
print(TO_DDP)
