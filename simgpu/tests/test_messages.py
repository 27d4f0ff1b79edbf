"""helpers.messages: each collective is counted once, with what the rank gives."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional

from simgpu import Messages, Ranks

# Functions of this file are sent like those of a notebook: no rank imports pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def four():
    with Ranks(4, device="cpu") as ranks:
        yield ranks


def noted(program):
    """(name, bytes, ranks) of what a program hands over; what a ring sends for it."""
    with Messages() as messages:
        program()
    return [(m.name, m.nbytes, m.ranks) for m in messages.log], messages.sent()


def ones(n: int) -> torch.Tensor:
    return torch.ones(n)


def box(n: int, at: int | None = None) -> list[torch.Tensor] | None:
    """A tensor for each rank; only on one rank if that is named."""
    return [ones(n) for _ in range(4)] if at in (None, dist.get_rank()) else None


def world():
    return dist.group.WORLD


PROGRAMS = [  # program, what is noted of it, bytes that it gives, that a ring sends
    (lambda: dist.all_reduce(ones(8)), "all_reduce", 32, 48),
    (lambda: dist.broadcast(ones(8), 0), "broadcast", 32, 32),
    (lambda: dist.reduce(ones(8), 0), "reduce", 32, 32),
    (lambda: dist.all_gather(box(2), ones(2)), "all_gather", 8, 24),
    (lambda: dist.all_gather_into_tensor(ones(8), ones(2)), "all_gather", 8, 24),
    (lambda: dist.reduce_scatter(ones(2), box(2)), "reduce_scatter", 32, 24),
    (lambda: dist.reduce_scatter_tensor(ones(2), ones(8)), "reduce_scatter", 32, 24),
    (lambda: dist.all_to_all_single(ones(8), ones(8)), "all_to_all", 32, 24),
    (lambda: dist.gather(ones(2), box(2, at=0)), "gather", 8, 8),
    (lambda: functional.all_reduce(ones(8), "sum", world()) + 0, "all_reduce", 32, 48),
    (lambda: functional.all_gather_tensor(ones(2), 0, world()) + 0,
     "all_gather", 8, 24),
    (lambda: functional.reduce_scatter_tensor(ones(8), "sum", 0, world()) + 0,
     "reduce_scatter", 32, 24),
]  # fmt: skip


def test_each_collective_is_noted_once(four):
    found = four.run(lambda: [noted(program) for program, *_ in PROGRAMS])
    for of_rank in found:
        for (log, sent), (_, name, nbytes, expected) in zip(
            of_rank, PROGRAMS, strict=True
        ):
            assert (log, sent) == ([(name, nbytes, 4)], expected)


def test_scatter_counts_at_the_one_who_gives(four):
    def scatter():
        dist.scatter(torch.empty(2), box(2, at=2), src=2)

    given = [sum(m[1] for m in log) for log, _ in four.run(noted, scatter)]
    assert given == [0, 0, 32, 0]


def test_sends_groups_and_barriers(four):
    def program():
        rank = dist.get_rank()
        talk = dist.send if rank % 2 else dist.recv
        talk(ones(5), rank ^ 1)
        dist.barrier()
        pairs = dist.new_group([0, 1]), dist.new_group([2, 3])
        dist.all_reduce(ones(3), group=pairs[rank // 2])

    even, odd, *_ = [log for log, _ in four.run(noted, program)]
    assert even == [("all_reduce", 12, 2)]
    assert odd == [("send", 20, 2), ("all_reduce", 12, 2)]


def test_ddp_fsdp_and_tensor_parallel(four):
    def train():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import parallel

        def layers():
            return nn.Sequential(nn.Linear(8, 16, False), nn.Linear(16, 8, False))

        mesh = init_device_mesh("cpu", (4,))
        plan = {"0": parallel.ColwiseParallel(), "1": parallel.RowwiseParallel()}
        tables = []
        for model in (
            nn.parallel.DistributedDataParallel(layers()),
            fully_shard(layers(), mesh=mesh),
            parallel.parallelize_module(layers(), mesh, plan),
        ):
            with Messages() as messages:
                model(torch.ones(2, 8)).sum().backward()
            assert {m.when for m in messages.log} == {""}
            tables.append(messages.by_name())
        model = fully_shard(nn.Linear(8, 8), mesh=mesh)
        model(torch.ones(2, 8)).sum().backward()
        with Messages() as messages:  # what DTensor sends inside of an operation
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        return *tables, messages.by_name(), norm.item()

    weights = 2 * 8 * 16 * 4
    plain = nn.Linear(8, 8)
    plain(torch.ones(2, 8)).sum().backward()
    expected = nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
    for ddp, fsdp, tensor, clip, norm in four.run(train):
        assert ddp == {"all_reduce": (1, weights)}
        assert fsdp["reduce_scatter"] == (1, weights)
        assert fsdp["all_gather"][1] == fsdp["all_gather"][0] * weights // 4
        assert tensor["all_reduce"][1] in (64, 128)  # forward; backward if x needs it
        assert list(clip) == ["all_reduce"] and clip["all_reduce"][1] <= 16
        assert norm == pytest.approx(expected, rel=1e-5)


def test_when_is_kept(four):
    def program():
        with Messages() as messages:
            for messages.when in ("first", "second"):
                dist.all_reduce(ones(1))
        return [m.when for m in messages.log], messages.total()

    assert four.run(program) == [(["first", "second"], 8)] * 4


def test_sparse_gradients_and_a_counter_in_a_counter(four):
    def program():
        model = nn.parallel.DistributedDataParallel(nn.Embedding(10, 4, sparse=True))
        with Messages() as messages, messages:
            model(torch.tensor([1, 2])).sum().backward()
        return messages.total() > 0, torch.autograd.is_multithreading_enabled()

    assert four.run(program) == [(True, True)] * 4
