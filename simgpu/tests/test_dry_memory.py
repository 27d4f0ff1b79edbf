"""What a dry run says of memory: of which kind it is, whose, and that it is full."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from simgpu._device import overhead
from simgpu._dry.run import Job, run

MIB = 2**20
RANKS, WIDTH, LAYERS = 8, 1024, 4
LAYER = 4 * WIDTH**2  # bytes of its weight


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def fsdp_1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=0
    )


def fsdp_2(model: nn.Module) -> nn.Module:
    for part in [*model.cuda(), model]:
        fully_shard(part)
    return model


WAYS = {
    "plain": lambda model: model.cuda(),
    "DDP": lambda model: DistributedDataParallel(model.cuda()),
    "FSDP1": fsdp_1,
    "FSDP2": fsdp_2,
}


def sends(model: nn.Module, yes: bool) -> contextlib.AbstractContextManager:
    """Whether the next backward pass sends gradients."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(yes)
    elif hasattr(model, "no_sync") and not yes:
        return model.no_sync()
    return contextlib.nullcontext()


def kinds_of(way: str, sent: tuple[bool, ...]) -> dict[str, int]:
    """Memory at the peak of steps with as many backward passes."""

    def program():
        dist.init_process_group("nccl")
        model = WAYS[way](layers())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            for yes in sent:
                with sends(model, yes):
                    model(torch.randn(8, WIDTH, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return run(Job(RANKS), program).memory_by_kind


@pytest.mark.parametrize("sent", [(True,), (True, True), (False, True)])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_added_up_are_gradients(way, sent):
    kinds = kinds_of(way, sent)
    if way in ("plain", "DDP") or not all(sent):
        # FSDP2 has sent those of one layer already when memory is highest
        expected = (LAYERS - (way == "FSDP2")) * LAYER
    else:
        expected = LAYER  # which waits to be sent
    assert kinds["gradients"] >= expected, kinds
    # of the layer in backward; FSDP1 has it once more, flat
    in_backward = (1 + (way == "FSDP1")) * LAYER
    assert kinds.get("other", 0) <= in_backward + MIB, kinds
    assert kinds.get("activations", 0) <= MIB, kinds


def test_gradients_that_make_room_for_others_are_gradients():
    def program():
        model = layers().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            for _ in range(2):
                before = [parameter.grad for parameter in model.parameters()]
                optimizer.zero_grad()
                model(torch.randn(8, WIDTH, device="cuda")).sum().backward()
            for parameter, its in zip(model.parameters(), before, strict=True):
                parameter.grad = parameter.grad + its
            del before, its
            optimizer.step()
            optimizer.zero_grad()

    kinds = run(Job(), program).memory_by_kind
    assert kinds["gradients"] >= 2 * LAYERS * LAYER, kinds


def test_what_is_reduced_inside_a_node_alone_are_gradients():
    """HSDP adds up over micro-batches what it has not sent to other nodes yet."""

    def program():
        dist.init_process_group("nccl")
        mesh = dist.init_device_mesh("cuda", (4, 2), mesh_dim_names=("far", "near"))
        model = layers().cuda()
        for part in [*model, model]:
            fully_shard(part, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            for last in (False, True):
                model.set_requires_all_reduce(last)
                model(torch.randn(8, WIDTH, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    kinds = run(Job(RANKS, node=2), program).memory_by_kind
    assert kinds["gradients"] >= LAYERS * LAYER // 2, kinds


def test_gradients_that_are_added_up_in_float32_are_gradients():
    """As Megatron-LM does: `main_grad`, which a hook adds to."""

    def program():
        model = layers().cuda().bfloat16()

        def add(parameter: nn.Parameter) -> None:
            parameter.main_grad.add_(parameter.grad)
            parameter.grad = None

        for parameter in model.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            parameter.register_post_accumulate_grad_hook(add)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            model(torch.randn(8, WIDTH, device="cuda").bfloat16()).sum().backward()
            optimizer.step()

    assert run(Job(), program).memory_by_kind["gradients"] == LAYERS * LAYER


@pytest.mark.parametrize("way", ["FSDP1", "FSDP2"])
def test_whole_parameters_are_named(way):
    kinds = kinds_of(way, (True,))
    assert LAYER <= kinds["gathered"] <= 3 * LAYER, kinds
    assert kinds["parameters"] == LAYERS * LAYER // RANKS


def test_what_a_split_model_gathers_are_activations():
    rows = 4096

    def program():
        dist.init_process_group("nccl")
        mesh = dist.init_device_mesh("cuda", (RANKS,))
        plan = {"3": ColwiseParallel(output_layouts=Replicate())}
        model = parallelize_module(layers().cuda(), mesh, plan)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
        for _ in range(2):
            model(torch.randn(rows, WIDTH, device="cuda")).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    kinds = run(Job(RANKS, steps=2), program).memory_by_kind
    assert "communication" not in kinds, kinds
    assert kinds["activations"] >= 5 * 4 * rows * WIDTH  # what it is given, and makes


# -- what is not PyTorch's -------------------------------------------------------------


def test_nccl_buffers_have_a_row():
    def program():
        dist.init_process_group("nccl")
        dist.all_reduce(torch.ones(1, device="cuda"))
        some = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1, device="cuda"), group=some)
        dist.destroy_process_group()  # which gives them back

    found = run(Job(RANKS), program)
    buffers = 2 * overhead.NCCL_BUFFERS
    assert found.outside_by_owner == {
        "CUDA's context": overhead.CONTEXT,
        "NCCL's buffers": buffers,
    }
    rows = [line.split("  ")[-1] for line in str(found).splitlines() if "NCCL" in line]
    assert [row.strip() for row in rows] == [f"{buffers / 2**30:.2f} GiB"]
    assert found.as_dict()["outside_by_owner"]["NCCL's buffers"] == buffers


def test_without_libraries_there_are_no_rows():
    found = run(Job(memory="128MB"), lambda: torch.ones(1, device="cuda"))
    assert found.outside_by_owner == {}
    assert "beside PyTorch" not in str(found)


def fill(rest: int) -> torch.Tensor:
    """Leave so many bytes of a card of 4 GiB."""
    size = 2**32 - overhead.CONTEXT - rest
    return torch.empty(size - size % (2 * MIB), dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("room, fits", [(20, True), (-20, False)])
def test_too_little_room_for_nccl_does_not_fit(room, fits):
    def program():
        dist.init_process_group("nccl")
        held = fill(overhead.NCCL_BUFFERS + room * MIB)
        dist.all_reduce(held[:1])

    found = run(Job(RANKS, memory="4GiB"), program)
    assert found.fits is fits
    if not fits:
        assert found.binds == "memory"
        assert found.error_line.startswith("test_dry_memory.py:")
        assert "NCCL's buffers: Cuda failure 2 'out of memory'" in str(found)


def says_more(error: type[BaseException], *words: object):
    """What a script may do with an out-of-memory error: it ends with another one."""

    def program():
        try:
            torch.empty(2**43, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            raise error(*words) from None

    return program


@pytest.mark.parametrize("error, word", [(RuntimeError, "too large"), (SystemExit, 1)])
def test_a_script_that_ends_because_of_full_memory_does_not_fit(error, word):
    found = run(Job(), says_more(error, word))
    assert not found.fits
    assert found.error.startswith("CUDA out of memory.")


def test_a_script_that_made_room_and_fails_later_has_failed():
    def program():
        with contextlib.suppress(torch.OutOfMemoryError):
            torch.empty(2**43, dtype=torch.uint8, device="cuda")
        raise ValueError("something else")

    with pytest.raises(ValueError, match="something else"):
        run(Job(), program)
