"""helpers.messages: each collective is counted once, with what the rank gives."""

import pytest
import torch
import torch.distributed as dist

from helpers import Ranks


@pytest.fixture(scope="module")
def four():
    with Ranks(4, backend="gloo") as ranks:
        yield ranks


def noted(program):
    """(name, bytes, ranks) of what a program hands over."""
    from helpers import Messages

    with Messages() as messages:
        program()
    return [(m.name, m.nbytes, m.ranks) for m in messages.log], messages.sent()


def box(n: int) -> list[torch.Tensor]:
    return [torch.empty(n) for _ in range(4)]


PROGRAMS = {
    "all_reduce": (lambda: dist.all_reduce(torch.ones(8)), 32, 48),
    "broadcast": (lambda: dist.broadcast(torch.ones(8), 0), 32, 32),
    "reduce": (lambda: dist.reduce(torch.ones(8), 0), 32, 32),
    "all_gather": (lambda: dist.all_gather(box(2), torch.ones(2)), 8, 24),
    "all_gather ": (
        lambda: dist.all_gather_into_tensor(torch.empty(8), torch.ones(2)), 8, 24,
    ),
    "reduce_scatter": (lambda: dist.reduce_scatter(torch.empty(2), box(2)), 32, 24),
    "reduce_scatter ": (
        lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.ones(8)), 32, 24,
    ),
    "all_to_all": (
        lambda: dist.all_to_all_single(torch.empty(8), torch.ones(8)), 32, 24,
    ),
    "gather": (
        lambda: dist.gather(torch.ones(2), box(2) if dist.get_rank() == 0 else None),
        8, 8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_collective(four, name):
    program, nbytes, sent = PROGRAMS[name]
    for log, wire in four.run(noted, program):
        assert log == [(name.strip(), nbytes, 4)] and wire == sent


def test_scatter_counts_at_the_one_who_gives(four):
    def scatter():
        mine = dist.get_rank() == 2
        dist.scatter(torch.empty(2), box(2) if mine else None, src=2)

    assert [sum(m[1] for m in log) for log, _ in four.run(noted, scatter)] == [
        0, 0, 32, 0,
    ]  # fmt: skip


def test_sends_groups_and_barriers(four):
    def program():
        rank = dist.get_rank()
        dist.send(torch.ones(5), rank ^ 1) if rank % 2 else dist.recv(
            torch.empty(5), rank ^ 1
        )
        dist.barrier()
        pairs = dist.new_group([0, 1]), dist.new_group([2, 3])
        dist.all_reduce(torch.ones(3), group=pairs[rank // 2])

    even, odd, *_ = [log for log, _ in four.run(noted, program)]
    assert even == [("all_reduce", 12, 2)]
    assert odd == [("send", 20, 2), ("all_reduce", 12, 2)]


def test_functional_collectives_and_dtensor(four):
    def program():
        from torch.distributed import _functional_collectives as funcol

        group = dist.group.WORLD
        funcol.all_reduce(torch.ones(8), "sum", group).sum()
        funcol.all_gather_tensor(torch.ones(2), 0, group).sum()
        funcol.reduce_scatter_tensor(torch.ones(8), "sum", 0, group).sum()

    for log, wire in four.run(noted, program):
        assert log == [
            ("all_reduce", 32, 4), ("all_gather", 8, 4), ("reduce_scatter", 32, 4),
        ]  # fmt: skip
        assert wire == 48 + 24 + 24


def test_ddp_fsdp_and_tensor_parallel(four):
    def train():
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        from helpers import Messages

        def layers():
            return nn.Sequential(nn.Linear(8, 16, False), nn.Linear(16, 8, False))

        mesh = init_device_mesh("cpu", (4,))
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        tables = []
        for model in (
            nn.parallel.DistributedDataParallel(layers()),
            fully_shard(layers(), mesh=mesh),
            parallelize_module(layers(), mesh, plan),
        ):
            with Messages() as messages:
                model(torch.ones(2, 8)).sum().backward()
            assert {m.when for m in messages.log} == {""}
            tables.append(messages.by_name())
        return tables, torch.autograd.is_multithreading_enabled()

    weights = 2 * 8 * 16 * 4
    for (ddp, fsdp, tensor), threads in four.run(train):
        assert ddp == {"all_reduce": (1, weights)}
        assert fsdp["reduce_scatter"] == (1, weights)
        assert fsdp["all_gather"][1] == fsdp["all_gather"][0] * weights // 4
        assert tensor["all_reduce"][1] in (64, 128)  # forward; backward if x needs it
        assert threads


def test_what_dtensor_sends_inside_of_an_operation(four):
    def clip():
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from helpers import Messages

        model = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (4,)))
        model(torch.ones(2, 8)).sum().backward()
        with Messages() as messages:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        return messages.by_name(), norm.item()

    plain = torch.nn.Linear(8, 8)
    plain(torch.ones(2, 8)).sum().backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    for messages, norm in four.run(clip):
        assert list(messages) == ["all_reduce"] and messages["all_reduce"][1] <= 16
        assert norm == pytest.approx(expected.item(), rel=1e-5)


def test_when_is_kept(four):
    def program():
        from helpers import Messages

        with Messages() as messages:
            for messages.when in ("first", "second"):
                dist.all_reduce(torch.ones(1))
        return [m.when for m in messages.log], messages.total()

    assert four.run(program) == [(["first", "second"], 8)] * 4


def test_sparse_gradients_and_a_counter_in_a_counter(four):
    def program():
        from torch import nn

        from helpers import Messages

        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Embedding(10, 4, sparse=True))
        with Messages() as messages, messages:
            model(torch.tensor([1, 2])).sum().backward()
        threads = torch.autograd.is_multithreading_enabled()
        return messages.total() > 0, threads

    assert four.run(program) == [(True, True)] * 4
