"""What DistributedDataParallel can be asked for beside the usual, against one process.

Pickled models, its own mixed precision, an optimizer that runs in backward, hooks,
streams, parameters that it leaves alone, batch norm over the ranks.
"""

import io
import os
import warnings

import torch
import torch.distributed as dist
from common import agree, agree_on
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    quantization,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import (
    PostLocalSGDOptimizer,
    _apply_optimizer_in_backward,
)
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("cpu:gloo,cuda:nccl")
ranks = dist.get_world_size()
torch.manual_seed(0)
whole = torch.randn(4 * ranks, 6)
mine = whole[4 * rank : 4 * (rank + 1)].to(device)
warnings.filterwarnings("ignore", category=FutureWarning)


def net(*, seed: int = 1, where: torch.device | str = device) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(where)


def backward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


one = net(where="cpu")
backward(one, whole)

# -- as it was saved -------------------------------------------------------------------
file = io.BytesIO()
torch.save(DDP(net(), device_ids=[rank]), file)
file.seek(0)
model = torch.load(file, weights_only=False)
for _ in range(2):  # the second time with the buckets in a new order
    model.zero_grad()
    backward(model, mine)
agree_on("unpickled", model.module, one)

# -- streams ---------------------------------------------------------------------------
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    model = DDP(net(), device_ids=[rank])
    backward(model, mine)
torch.cuda.current_stream().wait_stream(side)
agree_on("on a stream of its own", model.module, one)

# -- what it leaves alone, and what it does late ---------------------------------------
inner = net()
DDP._set_params_and_buffers_to_ignore_for_model(inner, ["2.weight"])
model = DDP(inner, device_ids=[rank])
backward(model, mine)
alone = net()
backward(alone, mine)
agree("reduced", inner[0].weight.grad, one[0].weight.grad)
agree("left alone", inner[2].weight.grad, alone[2].weight.grad)

inner = net()
late = [("2.weight", inner[2].weight)]
model = DDP(
    inner,
    device_ids=[rank],
    delay_all_reduce_named_params=late,
    param_to_hook_all_reduce=inner[0].weight,
)
backward(model, mine)
agree("late", inner[2].weight.grad, one[2].weight.grad)

# -- mixed precision, and an optimizer in backward -------------------------------------
mixed = _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)
model = DDP(net(), device_ids=[rank], mixed_precision=mixed)
for _ in range(2):  # at first PyTorch leaves the buckets as they were
    model.zero_grad()
    backward(model, mine)
assert model.module[0].weight.grad.dtype == torch.float32
agree_on("mixed precision", model.module, one, rtol=0.05, atol=2e-3)

inner, other = net(), net(where="cpu")
_apply_optimizer_in_backward(torch.optim.SGD, inner.parameters(), {"lr": 0.5})
model = DDP(inner, device_ids=[rank])
optimizer = torch.optim.SGD(other.parameters(), lr=0.5)
for _ in range(3):
    backward(model, mine)
    optimizer.zero_grad()
    backward(other, whole)
    optimizer.step()
assert inner[0].weight.grad is None
other.zero_grad()
agree_on("optimizer in backward", inner, other)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x):
        y = checkpoint(self.net, x, use_reentrant=False)
        return y + checkpoint(self.net, x, use_reentrant=False)


model = DDP(Checkpointed(), device_ids=[rank], static_graph=True)
for _ in range(3):
    model.zero_grad()
    (model(mine) / 2).square().mean().backward()
agree_on("static graph, checkpoints", model.module.net, one)


# -- hooks -----------------------------------------------------------------------------
def through_the_reducer(state, bucket: dist.GradBucket):
    """As PyTorch's own hooks for mixed precision do it."""
    found = state.reducer._run_allreduce_hook(bucket)
    (buffer,) = found.wait()
    done = torch.futures.Future()
    done.set_result(buffer.div_(ranks))
    return done


def in_two_steps(state, bucket: dist.GradBucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda f: f.value()[0] / ranks)


def quantized(state, bucket: dist.GradBucket):
    return quantization.quantization_perchannel_hook(dist.group.WORLD, bucket)


for hook, bounds in (
    (through_the_reducer, {}),
    (in_two_steps, {}),
    (default_hooks.allreduce_hook, {}),
    (default_hooks.fp16_compress_hook, {"rtol": 0.01, "atol": 1e-3}),
    (default_hooks.bf16_compress_hook, {"rtol": 0.02, "atol": 2e-3}),
    (quantized, {"rtol": 0.1, "atol": 5e-3}),
):
    model = DDP(net(), device_ids=[rank])
    state = model if hook is through_the_reducer else None
    model.register_comm_hook(state, hook)
    backward(model, mine)
    agree_on(hook.__name__, model.module, one, **bounds)
data = model._get_ddp_logging_data()
assert data["backend_name"] == "nccl" and data["device_ids"] == str(rank), data
assert data["comm_hook"] == "quantized" and data["num_parameter_tensors"] == 4

model = DDP(net(), device_ids=[rank])
nobody = dist.new_group([rank], use_local_synchronization=True)
hooked = post_localSGD_hook.PostLocalSGDState(None, nobody, start_localSGD_iter=1)
model.register_comm_hook(hooked, post_localSGD_hook.post_localSGD_hook)
optimizer = PostLocalSGDOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1),
    PeriodicModelAverager(period=2, warmup_steps=1),
)
for _ in range(4):
    optimizer.zero_grad()
    backward(model, mine)
    optimizer.step()
gathered = [torch.empty(2, 8, device=device) for _ in range(ranks)]
dist.all_gather(gathered, model.module[2].weight.detach())
assert all(torch.equal(weight, gathered[0]) for weight in gathered), "not averaged"

# -- on the host, beside it ------------------------------------------------------------
model = DDP(net(where="cpu"))
backward(model, mine.cpu())
agree_on("on the host", model.module, one)


# -- batch norm over the ranks ---------------------------------------------------------
def normed(rows: torch.Tensor, model: nn.Module) -> torch.Tensor:
    return model(rows).square().mean()


cuts = [0, *(2 * (i + 1) + i for i in range(ranks - 1)), len(whole)]  # uneven
rows = whole[cuts[rank] : cuts[rank + 1]].to(device)
torch.manual_seed(2)
plain = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2))
inner = nn.SyncBatchNorm.convert_sync_batchnorm(
    nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2)), dist.group.WORLD
).to(device)
inner.load_state_dict(plain.state_dict())
model = DDP(inner, device_ids=[rank])
(model(rows).square().sum() * ranks / (2 * len(whole))).backward()
plain(whole).square().mean().backward()
agree_on("sync batch norm", inner, plain)
agree("running mean", inner[0].running_mean, plain[0].running_mean)
agree("running var", inner[0].running_var, plain[0].running_var)
model.eval(), plain.eval()
agree("eval", model(rows), plain(whole)[cuts[rank] : cuts[rank + 1]])
half = nn.SyncBatchNorm(6).to(device)
out = half(rows.half())
assert out.dtype == torch.float16
agree("float16", out.float(), half.cpu().eval() and nn.BatchNorm1d(6)(whole)[
    cuts[rank] : cuts[rank + 1]
], rtol=0.01, atol=5e-3)  # fmt: skip
means, invstds = torch.zeros(2, 6, device=device), torch.ones(2, 6, device=device)
mean, invstd = torch.batch_norm_gather_stats(
    rows, means, invstds, None, None, 0.1, 1e-5, 4
)
agree("by name", invstd, torch.ones(6))

dist.destroy_process_group()
if rank == 0:
    print("ok ddp_kinds: 19 comparisons")
