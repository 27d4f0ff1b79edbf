"""Tensor parallel by hand: a column, dropout on slices, a row, and a sum over ranks."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import gelu, linear, mse_loss

BATCH, WIDTH = 8, 32


class Copy(torch.autograd.Function):
    """Forward: the input. Backward: the gradients of all ranks are added up."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Sum(torch.autograd.Function):
    """Forward: the inputs of all ranks are added up. Backward: the gradient."""

    @staticmethod
    def forward(context, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(context, gradient):
        return gradient


class SlicedMlp(nn.Module):
    def __init__(self, rank, world_size):
        super().__init__()
        up = nn.Linear(WIDTH, 4 * WIDTH)
        down = nn.Linear(4 * WIDTH, WIDTH)
        mine = slice(
            rank * 4 * WIDTH // world_size, (rank + 1) * 4 * WIDTH // world_size
        )
        self.up = nn.Parameter(up.weight[mine].clone())
        self.up_bias = nn.Parameter(up.bias[mine].clone())
        self.down = nn.Parameter(down.weight[:, mine].clone())
        self.bias = nn.Parameter(down.bias.clone())
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        hidden = gelu(linear(Copy.apply(x), self.up, self.up_bias))
        out = Sum.apply(linear(self.dropout(hidden), self.down))
        return out + self.bias


local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
inputs, targets = torch.randn(48, WIDTH), torch.randn(48, WIDTH)
first = nn.Linear(WIDTH, WIDTH)
model = nn.Sequential(first, SlicedMlp(rank, world_size)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(1 + rank)  # of dropout: ranks have different slices

for step in range(6):
    batch = torch.arange(BATCH) + step * BATCH
    loss = mse_loss(model(inputs[batch].cuda()), targets[batch].cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
