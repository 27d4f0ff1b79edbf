"""Notes what a training program does, from outside: the program is not changed.

The recorder hooks what every program calls: modules, backward, `clip_grad_norm_` and
optimizers. Dropout is left out, so that two runs can be compared: the elements that it
would drop are drawn and noted, and nothing is dropped. Reading values waits for the
GPU, so times mean nothing in a program that is recorded.

A step ends where the next forward pass begins, so several optimizers may take part.

Leaves out: programs without a `torch.optim` optimizer, pipelines (each rank has other
modules), copies of the weights (EMA), validation, and the masks of dropout other than
`nn.Dropout` (that of attention is left out as well).
"""

import contextlib
import functools
import hashlib
import os
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as hooks
from torch.optim import optimizer as optimizers
from torch.utils.data import DistributedSampler

from simgpu._compat import AsyncCollectiveTensor
from simgpu._prove.inputs import part_of, tensors_in
from simgpu._prove.names import Names, Ties
from simgpu._prove.record import Mask, Moments, RankRecord, Step

MOST_PARAMETERS = 5_000_000


class TooLarge(ValueError):
    """The model has more parameters than can be kept for each step."""


class Recorder:
    """Notes the first steps of the program that runs while it is entered.

    Args:
        steps: how many to note; later ones are not looked at.
    """

    def __init__(self, steps: int):
        self.record = RankRecord(int(os.environ.get("RANK", 0)))
        self._wanted = steps
        self._names = Names()
        self._depth = 0  # of modules that are being called
        self._in_backward = False
        self._in_step = 0  # of optimizers, one of which may hold another
        self._quiet = False  # what the recorder itself calls
        self._step = Step()
        self._optimizers: list = []  # that have taken part in this step
        self._raw: dict[str, torch.Tensor] = {}
        self._epochs: dict[int, set[int]] = {}
        self._ties = Ties()
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> "Recorder":
        undo = self._undo
        for remove in (
            hooks.register_module_forward_pre_hook(self._enter_module),
            hooks.register_module_forward_hook(self._leave_module, with_kwargs=True),
            optimizers.register_optimizer_step_pre_hook(self._before_update),
            optimizers.register_optimizer_step_post_hook(self._after_update),
            hooks.register_module_parameter_registration_hook(self._register),
        ):
            undo.callback(remove.remove)
        self._replace(torch.autograd, "backward", self._backward)
        self._replace(nn.functional, "dropout", self._dropout)
        for where in (nn.utils, nn.utils.clip_grad):
            self._replace(where, "clip_grad_norm_", self._clip)
        self._replace(DistributedSampler, "__iter__", self._begin_epoch)
        self._replace_attention()
        return self

    def __exit__(self, error: type | None = None, *exc_info) -> None:
        if error is None:
            self._end_step(ended=True)
        self._undo.close()

    @property
    def _on(self) -> bool:
        return not self._quiet and len(self.record.steps) < self._wanted

    def _replace(self, where, name: str, ours) -> None:
        """Put a method of ours, which is given the original, in a function's place."""
        original = getattr(where, name)

        @functools.wraps(original)  # PyTorch finds some by their names
        def replacement(*args, **kwargs):
            return ours(original, *args, **kwargs)

        setattr(where, name, replacement)
        self._undo.callback(setattr, where, name, original)

    def _replace_attention(self) -> None:
        def without_dropout(
            original, query, key, value, attn_mask=None, dropout_p=0.0, *args, **kwargs
        ):
            return original(query, key, value, attn_mask, 0.0, *args, **kwargs)

        name = "scaled_dot_product_attention"
        self._replace(nn.functional, name, without_dropout)

    def _register(self, module: nn.Module, name: str, parameter) -> None:
        self._ties.add(module, name, parameter)

    # -- forward -----------------------------------------------------------------------

    def _enter_module(self, module: nn.Module, args) -> None:
        if not self._on or self._in_backward:
            return
        if self._depth == 0 and _has_values(module):
            if torch.is_grad_enabled():
                self._end_step()
            self._names.add(module)
            before, parameters = self._step.before, self._names.parameters()
            if new := {n: p for n, p in parameters.items() if n not in before}:
                before |= self._values(new)
                self.record.untied = self._ties.broken(self._names)
        self._depth += 1

    def _leave_module(self, module: nn.Module, args, kwargs, out) -> None:
        if not self._on or self._in_backward:
            return
        self._depth -= 1
        name = self._names.of_module(module)
        if name is None or not torch.is_grad_enabled():
            return
        if self._depth == 0:
            positional = {f"input {n}": value for n, value in enumerate(args)}
            self._note_inputs(name or "the model's", positional | kwargs)
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            with self._unseen():
                values = _host(_local(out))
            self._step.outputs.setdefault(name, Moments()).add(values)

    def _note_inputs(self, model: str, given: dict[str, object]) -> None:
        """Note what a model is given, but not what another one has computed."""
        for name, value in given.items():
            for place, tensor in tensors_in(value, name):
                if tensor.grad_fn is not None or not tensor.numel():
                    continue
                with self._unseen():
                    part = part_of(_host(_local(tensor)))
                self._step.inputs.setdefault(f"{model} {place}", []).append(part)

    def _dropout(self, original, x, p=0.5, training=True, inplace=False):
        if not training or p == 0 or self._quiet:
            return original(x, p, training, inplace)
        noted = self._on and not self._in_backward
        with self._unseen():
            kept = original(torch.ones_like(x), p, True, False)
            if noted:
                on = Moments()
                on.add(_host(_local(x)))
                dropped = _hash(_host(_local(kept)) == 0)
                name = self._module_now()
                chance = (p**2 + (1 - p) ** 2) ** x.numel()
                mask = Mask(name, tuple(x.shape), on, dropped, chance)
                self._step.masks.append(mask)
        return x.clone()

    def _module_now(self) -> str:
        """The module whose output comes next: the last one that was noted is before."""
        done = [name for name in self._step.outputs if name]
        return f"the dropout after {done[-1]}" if done else "the first dropout"

    # -- backward ----------------------------------------------------------------------

    def _backward(self, original, tensors, *args, **kwargs):
        losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if self._on:
            with self._unseen():
                self._step.losses += [
                    float(_host(_full(loss)).sum())
                    for loss in losses
                    if loss.numel() == 1
                ]
        self._in_backward = True
        try:
            original(tensors, *args, **kwargs)
        finally:
            self._in_backward = False
        if self._on:
            with self._unseen():
                self._raw = {
                    name: parameter.grad.detach().clone()
                    for name, parameter in self._names.parameters().items()
                    if parameter.grad is not None
                }

    def _clip(self, original, *args, **kwargs):
        norm = original(*args, **kwargs)
        if self._on:
            with self._unseen():
                self._step.norm = float(_host(_full(norm)))
        return norm

    # -- the optimizer -----------------------------------------------------------------

    def _before_update(self, optimizer, args, kwargs) -> None:
        self._in_step += 1
        if self._in_step > 1 or not self._on:
            return
        parameters = self._names.parameters()
        count = sum(parameter.numel() for parameter in parameters.values())
        if count > MOST_PARAMETERS:
            raise TooLarge(
                f"the model has {count:,} parameters; every gradient of every step is "
                f"kept, so make it smaller: at most {MOST_PARAMETERS:,}"
            )
        step = self._step
        if not self._optimizers:
            step.raw = self._values(self._raw)
        groups = sum(len(earlier.param_groups) for earlier in self._optimizers)
        self._optimizers.append(optimizer)
        step.used |= self._values(
            {
                name: parameter.grad
                for name, parameter in parameters.items()
                if parameter.grad is not None and _has(optimizer, parameter)
            }
        )
        for number, group in enumerate(optimizer.param_groups, groups):
            for key, value in group.items():
                if isinstance(value, float | int) and not isinstance(value, bool):
                    step.settings[f"group {number}", key] = float(value)
        step.without_optimizer = [
            name
            for name, parameter in parameters.items()
            if parameter.grad is not None
            and not any(_has(each, parameter) for each in self._optimizers)
        ]

    def _after_update(self, optimizer, args, kwargs) -> None:
        self._in_step -= 1
        if self._in_step or not self._on:
            return
        self._step.after = self._values(self._names.parameters())
        self._step.buffers = self._values(self._names.buffers())
        self._look_elsewhere()

    def _end_step(self, *, ended: bool = False) -> None:
        """A step ends where the next one begins: several optimizers may take part.

        Args:
            ended: the program has, and what is sharded cannot be gathered any more.
        """
        if self._optimizers and self._on:
            parameters = self._names.parameters()
            lost = ended and any(isinstance(p, DTensor) for p in parameters.values())
            self._step.later = self._step.after if lost else self._values(parameters)
            self.record.steps.append(self._step)
            self._step, self._raw, self._optimizers = Step(), {}, []

    def _look_elsewhere(self) -> None:
        """Note memory on GPUs that belong to other ranks."""
        own = int(os.environ.get("LOCAL_RANK", 0))
        for gpu in range(torch.cuda.device_count()):
            if gpu != own and (used := torch.cuda.memory_allocated(gpu)):
                self.record.elsewhere[gpu] = used

    def _begin_epoch(self, original, sampler) -> Iterator[int]:
        if sampler.shuffle and torch.is_grad_enabled():  # validation may repeat
            seen = self._epochs.setdefault(id(sampler), set())
            if sampler.epoch in seen:
                self.record.repeated_epochs.append(sampler.epoch)
            seen.add(sampler.epoch)
        return original(sampler)

    # -- reading values ----------------------------------------------------------------

    @contextlib.contextmanager
    def _unseen(self) -> Iterator[None]:
        """What runs here is the recorder's own."""
        before, self._quiet = self._quiet, True
        try:
            with torch.no_grad():
                yield
        finally:
            self._quiet = before

    def _values(self, tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
        with self._unseen():
            return {name: _host(_full(t)) for name, t in tensors.items()}


def _has_values(module: nn.Module) -> bool:
    """Whether it may be trained: one on "meta" is asked for its shapes or FLOPs."""
    first = next(module.parameters(), None)
    return first is not None and not first.is_meta


def _has(optimizer, parameter: nn.Parameter) -> bool:
    """Whether an optimizer updates a parameter."""
    groups = optimizer.param_groups
    return any(parameter is one for group in groups for one in group["params"])


def _full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor: what is sharded is gathered, so every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it; of a nested tensor, all values in a row."""
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if tensor.is_nested:
        return torch.cat([one.flatten() for one in tensor.unbind()])
    return tensor


def _host(tensor: torch.Tensor) -> np.ndarray:
    """Its values, in float64."""
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    if tensor.layout != torch.strided:  # the gradient of a sparse embedding
        tensor = tensor.to_dense()
    return tensor.detach().cpu().double().numpy()


def _hash(values: np.ndarray) -> int:
    digest = hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
