"""Linear layers over a group, as the sweep's trainer and Megatron-LM have them.

With sequence parallelism: activations between layers are cut along the tokens, so that
a layer begins by gathering them and ends by scattering a sum. Shapes: (tokens, batch,
width); `group` is None where nothing is cut.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.nn import functional


class Buffers:
    """What is gathered again in backward lies in one place, for all layers."""

    def __init__(self) -> None:
        self._made: dict[str, torch.Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], like: torch.Tensor):
        count = torch.Size(shape).numel()
        made = self._made.get(name)
        if made is None or made.numel() < count:
            made = self._made[name] = like.new_empty(count)
        return made[:count].view(shape)

    @property
    def nbytes(self) -> int:
        return sum(made.nbytes for made in self._made.values())

    def clear(self) -> None:
        self._made.clear()


BUFFERS = Buffers()


def _gathered(tensor: torch.Tensor, group) -> tuple[int, ...]:
    return (len(tensor) * group.size(), *tensor.shape[1:])


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1, tensor.shape[-1])


class ColumnLinear(Function):
    """Gathers its input; a part of the product runs beside that."""

    @staticmethod
    def forward(ctx, tensor, weight, group, overlaps):
        ctx.group = group
        tensor = tensor.contiguous()
        ctx.save_for_backward(tensor, weight)
        if group is None:
            return functional.linear(tensor, weight)
        whole = BUFFERS.get("gathered", _gathered(tensor, group), tensor)
        work = dist.all_gather_into_tensor(whole, tensor, group=group, async_op=True)
        if not overlaps:
            work.wait()
            return functional.linear(whole, weight)
        out = tensor.new_empty((*whole.shape[:-1], len(weight)))
        mine = len(tensor)
        torch.mm(_flat(tensor), weight.t(), out=_flat(out[:mine]))
        work.wait()
        torch.mm(_flat(whole[mine:]), weight.t(), out=_flat(out[mine:]))
        return out

    @staticmethod
    def backward(ctx, grad):
        tensor, weight = ctx.saved_tensors
        group = ctx.group
        if group is None:
            grad = grad.contiguous()
            return grad.matmul(weight), _flat(grad).t() @ _flat(tensor), None, None
        whole = BUFFERS.get("gathered", _gathered(tensor, group), tensor)
        gather = dist.all_gather_into_tensor(whole, tensor, group=group, async_op=True)
        grad_whole = grad.matmul(weight)
        grad = grad.contiguous()
        part = torch.empty_like(tensor)
        scatter = dist.reduce_scatter_tensor(part, grad_whole, group=group,
                                             async_op=True)  # fmt: skip
        gather.wait()
        grad_weight = _flat(grad).t() @ _flat(whole)
        scatter.wait()
        return part, grad_weight, None, None


class RowLinear(Function):
    """Scatters the sum of its outputs."""

    @staticmethod
    def forward(ctx, tensor, weight, group, overlaps):
        ctx.group, ctx.overlaps = group, overlaps
        ctx.save_for_backward(tensor, weight)
        out = functional.linear(tensor, weight)
        if group is None:
            return out
        part = out.new_empty((len(out) // group.size(), *out.shape[1:]))
        dist.reduce_scatter_tensor(part, out, group=group)
        return part

    @staticmethod
    def backward(ctx, grad):
        tensor, weight = ctx.saved_tensors
        group = ctx.group
        grad = grad.contiguous()
        if group is None:
            inputs = grad.matmul(weight)
            return inputs, _flat(grad).t() @ _flat(tensor.contiguous()), None, None
        whole = BUFFERS.get("gradients", _gathered(grad, group), grad)
        work = dist.all_gather_into_tensor(whole, grad, group=group, async_op=True)
        if ctx.overlaps:
            out = grad.new_empty((*whole.shape[:-1], weight.shape[1]))
            mine = len(grad)
            torch.mm(_flat(grad), weight, out=_flat(out[:mine]))
            work.wait()
            torch.mm(_flat(whole[mine:]), weight, out=_flat(out[mine:]))
        else:
            work.wait()
            out = whole.matmul(weight)
        return out, _flat(whole).t() @ _flat(tensor.contiguous()), None, None


class Scatter(Function):
    """The sum over the ranks, of which each keeps some tokens."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        part = tensor.new_empty((len(tensor) // group.size(), *tensor.shape[1:]))
        dist.reduce_scatter_tensor(part, tensor.contiguous(), group=group)
        return part

    @staticmethod
    def backward(ctx, grad):
        whole = grad.new_empty(_gathered(grad, ctx.group))
        dist.all_gather_into_tensor(whole, grad.contiguous(), group=ctx.group)
        return whole, None


class Embedding(nn.Module):
    """Words are spread over the ranks."""

    def __init__(self, words: int, width: int, group):
        super().__init__()
        self.group = group
        self.words = words // (group.size() if group else 1)
        self.weight = nn.Parameter(torch.empty(self.words, width))

    def forward(self, ids):
        ids = ids.transpose(0, 1)
        if self.group is None:
            return functional.embedding(ids, self.weight)
        mask = (ids < 0) | (ids >= self.words)
        mine = ids.clone() - 0
        mine[mask] = 0
        out = functional.embedding(mine, self.weight) * (~mask[..., None])
        return Scatter.apply(out, self.group)


class CrossEntropy(Function):
    """Of logits whose words are spread over the ranks."""

    @staticmethod
    def forward(ctx, logits, target, group):
        highest = torch.max(logits, dim=-1)[0]
        if group is not None:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        logits = logits - highest.unsqueeze(-1)
        words = logits.shape[-1]
        mask = (target < 0) | (target >= words)
        mine = target.clone() - 0
        mine[mask] = 0
        flat, mine = logits.view(-1, words), mine.view(-1)
        rows = torch.arange(len(flat), device=flat.device)
        chosen = flat[rows, mine].clone().view_as(target)
        chosen[mask] = 0.0
        if group is not None:
            dist.all_reduce(chosen, group=group)
        torch.exp(logits, out=logits)
        total = logits.sum(dim=-1)
        if group is not None:
            dist.all_reduce(total, group=group)
        loss = torch.log(total) - chosen
        logits.div_(total.unsqueeze(-1))
        ctx.save_for_backward(logits, mask, mine)
        return loss.view_as(target)

    @staticmethod
    def backward(ctx, grad):
        softmax, mask, mine = ctx.saved_tensors
        flat = softmax.view(-1, softmax.shape[-1])
        rows = torch.arange(len(flat), device=flat.device)
        flat[rows, mine] -= 1.0 - mask.view(-1).float()
        softmax.mul_(grad.unsqueeze(-1))
        return softmax, None, None
