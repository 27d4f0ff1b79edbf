"""Context parallelism: each rank has a part of every sequence.

PyTorch's own ring under `scaled_dot_product_attention`, forward and backward, with
both ways to pass keys and values round: alone, and in a small GPT.
"""

import argparse
import copy
import warnings

import torch
import torch.distributed as dist
from common import GPT, agree, agree_on, batches, join, leave, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import (
    context_parallel_unshard,
    set_rotate_method,
)
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

parser = argparse.ArgumentParser()
parser.add_argument("--kernel", choices=["efficient", "flash"], default="efficient")
args = parser.parse_args()
warnings.filterwarnings("ignore", category=FutureWarning)

rank, ranks, device = join()
mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("cp",))
length = 8 * ranks

# flash attention takes half precision only
kernel, dtype, near = {
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, torch.float32, 2e-5),
    "flash": (SDPBackend.FLASH_ATTENTION, torch.bfloat16, 3e-2),
}[args.kernel]


def attention(rotate: str) -> None:
    """One causal attention whose queries, keys and values are split by position."""
    set_rotate_method(rotate)
    make = torch.Generator().manual_seed(0)
    shape = (4, 2, 2, length, 8)  # q, k, v and weights of (rows, heads, places, dim)
    q, k, v, weights = torch.randn(shape, generator=make).to(device, dtype)
    whole = [x.float().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*whole, is_causal=True)
    (expected * weights.float()).sum().backward()

    mine = [x.detach().clone() for x in (q, k, v, weights)]
    # Each rank has an early and a late part: causal attention is equal work then.
    with sdpa_kernel(kernel), context_parallel(
        mesh, buffers=mine, buffer_seq_dims=[2] * 4, no_restore_buffers=set(mine)
    ):  # fmt: skip
        parts = [x.requires_grad_() for x in mine[:3]]
        assert parts[0].shape[2] == length // ranks
        out = F.scaled_dot_product_attention(*parts, is_causal=True)
        (out * mine[3]).sum().backward()
        grads = [part.grad for part in parts]
        found = context_parallel_unshard(mesh, [out, *grads], [2] * 4)
    for name, one, other in zip(
        ["output", "dq", "dk", "dv"],
        found,
        [expected, *(x.grad for x in whole)],
        strict=True,
    ):
        agree(f"{rotate}: {name}", one.float(), other, atol=near)


def train(rotate: str) -> float:
    """A step of a GPT; its parameters are whole on every rank."""
    set_rotate_method(rotate)
    torch.manual_seed(0)
    reference = GPT(length=length).to(device)
    model = copy.deepcopy(reference).to(dtype)
    batch = batches(1, 2, length, device=device)[0]
    whole = loss_of(reference, batch)
    whole.backward()

    inputs, targets = batch[:, :-1].clone(), batch[:, 1:].clone()
    places = torch.arange(length, device=device)
    with sdpa_kernel(kernel), context_parallel(
        mesh, buffers=[inputs, targets, places], buffer_seq_dims=[1, 1, 0]
    ):  # fmt: skip
        logits = model(inputs, places)
        assert logits.shape[1] == length // ranks
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
    assert inputs.shape[1] == length  # the buffers are whole again
    loss = loss.detach()
    for result in (loss, *(parameter.grad for parameter in model.parameters())):
        dist.all_reduce(result, dist.ReduceOp.AVG)
    agree(f"{rotate}: loss", loss, whole, atol=near)
    agree_on(f"{rotate}: GPT", model.float(), reference, atol=near)
    return loss.item()


for rotate in ("allgather", "alltoall"):
    attention(rotate)
    loss = train(rotate)
leave(f"context_parallel: {ranks} ranks, {args.kernel}, loss {loss:.4f}")
