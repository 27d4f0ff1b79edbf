"""Train on all GPUs of one machine from one process: `python split_batch.py`.

`nn.DataParallel` splits each batch over the GPUs. Batches are dictionaries of tensors,
and the loss is computed inside `forward`, so that each GPU sends back two numbers: the
sum of its losses and how many they are. Before the training, loss and gradients of a
batch are compared with those of one GPU, in eval mode, because dropout and BatchNorm
differ from part to part. At the end, the script prints how much memory the training
took on each GPU, and what to change for DDP. Used in lesson 12.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser(description="Train with nn.DataParallel.")
parser.add_argument("--batch-size", type=int, default=128, help="of all GPUs together")
parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
parser.add_argument(
    "--no-compare", action="store_true", help="where one GPU cannot hold a whole batch"
)
options = parser.parse_args()

TO_DDP = """For DDP, as in four_gpus.py:
  start a process for each GPU: torchrun --standalone --nproc-per-node=4
  take a GPU by LOCAL_RANK, set_device, init_process_group("nccl")
  DDP(model, device_ids=[local_rank]) in the place of nn.DataParallel
  DistributedSampler with set_epoch; batch_size // world_size for each rank
  losses: DDP averages over ranks, which may have unequal counts. In loss_of:
    count = count.detach().clone()
    dist.all_reduce(count)
    return total * dist.get_world_size() / count
  BatchNorm: model = nn.SyncBatchNorm.convert_sync_batchnorm(model) before DDP
  rank 0 prints and saves"""


class Images(Dataset):
    """Your data: each item is a dictionary of tensors and numbers."""

    def __init__(self):
        self.images = torch.randn(1024, 64)
        self.labels = self.images[:, :10].argmax(1)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"images": self.images[index], "labels": self.labels[index]}


class WithLoss(nn.Module):
    """The model and its loss: what each GPU runs on its part of a batch."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        # Inside of forward: the threads of the replicas do not learn the dtype
        with torch.autocast("cuda", torch.bfloat16, enabled=options.bf16):
            scores = self.model(batch["images"])  # your inputs
        # Of a language model whose labels are its inputs, take scores[:, :-1] and
        # batch["labels"][:, 1:] here: it predicts the next token.
        scores, labels = scores.float().flatten(0, -2), batch["labels"].flatten()
        loss = nn.functional.cross_entropy(scores, labels, reduction="sum")  # your loss
        count = (labels != -100).sum()  # -100 is padding: it has no loss
        return torch.stack([loss, count])[None]  # parts may have unequal counts


def checked(batch):
    """Returns the batch, or says which of its tensors nn.DataParallel would not cut.

    Every tensor is cut along its first dimension. If one has fewer rows than the
    others, samples are lost without an error.
    """
    batch = dict(batch)  # Hugging Face's batches are of a class that is never cut
    for name, value in batch.items():
        texts = isinstance(value, list) and all(isinstance(v, str) for v in value)
        if isinstance(value, (dict, list, tuple)) and not texts:
            raise ValueError(f"{name!r} of a batch: give each tensor a name of its own")
    rows = {
        name: len(value) if value.dim() else 0
        for name, value in batch.items()
        if isinstance(value, torch.Tensor)
    }
    if len(set(rows.values())) > 1:
        raise ValueError(
            f"rows of the tensors of a batch: {rows}; all need as many. Make what all "
            "samples share inside of forward, or keep it in a buffer of the model"
        )
    return batch


def loss_of(net, batch):
    total, count = net(batch).sum(0)  # over the GPUs
    return total / count


def compare(alone, parallel, batch, first):
    """Loss and gradients of a batch on all GPUs, with those of the first one."""
    weights = {n: p for n, p in alone.model.named_parameters() if p.requires_grad}

    def loss_and_gradients(net, batch):
        loss = loss_of(net, batch)
        found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        pairs = zip(weights, found, strict=True)
        return loss, {name: grad for name, grad in pairs if grad is not None}

    on_first = {
        name: value.to(first) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }
    parallel.eval()  # no dropout: its random numbers differ from part to part
    one, gradients_of_one = loss_and_gradients(alone, on_first)
    all_, gradients = loss_and_gradients(parallel, batch)
    parallel.train()
    near = 1e-2 if options.bf16 else 1e-4
    torch.testing.assert_close(all_, one, rtol=near, atol=near / 10)
    largest = max(gradient.abs().max() for gradient in gradients_of_one.values())
    near = max(near, 1e-3) * largest.item()  # 1e-3: real GPUs may round to TF32
    unused = sorted(weights.keys() - gradients_of_one.keys())  # 0 from nn.DataParallel
    found = {name: gradients[name] for name in gradients_of_one}
    torch.testing.assert_close(found, gradients_of_one, rtol=0, atol=near)
    gpus = len(parallel.device_ids)
    print(f"first batch: loss {one:.4f} on one GPU, {all_:.4f} on {gpus}")
    print(f"{len(found)} gradients agree")
    if unused:
        print(f"no gradient; DDP needs find_unused_parameters=True: {unused}")
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in alone.modules()):
        print("BatchNorm: training takes the statistics of each part, unlike one GPU")


def main():
    gpus = list(range(torch.cuda.device_count()))
    if not gpus:
        parser.error("nn.DataParallel needs a GPU, and there is none")
    torch.manual_seed(0)
    model = nn.Sequential(  # your model
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    loader = DataLoader(Images(), options.batch_size, shuffle=True)  # your data

    first = torch.device("cuda", gpus[0])
    model = model.to(first)  # before nn.DataParallel: weights must be on device_ids[0]
    alone = WithLoss(model)
    parallel = nn.DataParallel(alone, device_ids=gpus)
    if not options.no_compare:
        compare(alone, parallel, checked(next(iter(loader))), first)

    optimizer = torch.optim.Adam(model.parameters())  # your optimizer
    before = [torch.cuda.memory_allocated(gpu) for gpu in gpus]
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)  # what the comparison took is no matter
    for epoch in range(3):
        total = 0.0
        for batch in loader:  # on the CPU: each part goes straight to its GPU
            loss = loss_of(parallel, checked(batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        print(f"epoch {epoch}: loss {total.item() / len(loader):.4f}")

    for gpu, less in zip(gpus, before, strict=True):
        more = (torch.cuda.max_memory_allocated(gpu) - less) / 2**20
        print(f"cuda:{gpu}: training took at most {more:.1f} MiB")
    torch.save(model.state_dict(), "model.pt")  # the model's own: no `module.`
    print(TO_DDP)


if __name__ == "__main__":  # not in the workers of a DataLoader
    main()
