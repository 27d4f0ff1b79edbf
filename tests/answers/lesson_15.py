"""Answers to the exercises of lesson 15: right ones, and planted wrong ones."""

import torch
import torch.distributed as dist


def who():
    return dist.get_rank(), dist.get_world_size()


# -- all_gather ------------------------------------------------------------------------


def gathered(x):
    rank, size = who()
    found = [torch.empty_like(x) for _ in range(size)]
    found[rank] = x.clone()
    for step in range(size - 1):
        sending = dist.isend(found[(rank - step) % size], (rank + 1) % size)
        dist.recv(found[(rank - step - 1) % size], (rank - 1) % size)
        sending.wait()
    return found


def gathered_in_turn(x):
    """Blocking calls only; the result is one tensor."""
    rank, size = who()
    found = torch.empty(size, len(x))
    found[rank] = x
    for step in range(size - 1):
        mine, other = found[(rank - step) % size], found[(rank - step - 1) % size]
        if rank % 2:
            dist.recv(other, (rank - 1) % size)
            dist.send(mine, (rank + 1) % size)
        else:
            dist.send(mine, (rank + 1) % size)
            dist.recv(other, (rank - 1) % size)
    return found


def gathered_in_batches(x):
    rank, size = who()
    found, moving = {rank: x}, x
    for step in range(size - 1):
        box = torch.empty_like(x)
        pair = [
            dist.P2POp(dist.isend, moving, (rank + 1) % size),
            dist.P2POp(dist.irecv, box, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        found[(rank - step - 1) % size] = moving = box
    return [found[r] for r in range(size)]


def by_arrival(x):
    rank, size = who()
    found = gathered(x)
    return [found[(rank - step) % size] for step in range(size)]


def always_its_own(x):
    rank, size = who()
    found = [x.clone() for _ in range(size)]
    for step in range(size - 1):
        sending = dist.isend(x, (rank + 1) % size)
        dist.recv(found[(rank - step - 1) % size], (rank - 1) % size)
        sending.wait()
    return found


def to_everyone(x):
    rank, size = who()
    found = [x.clone() for _ in range(size)]
    others = [r for r in range(size) if r != rank]
    sending = [dist.isend(x, r) for r in others]
    for r in others:
        dist.recv(found[r], r)
    for work in sending:
        work.wait()
    return found


def all_in_every_step(x):
    rank, size = who()
    found = torch.zeros(size, len(x))
    found[rank] = x
    for _ in range(size - 1):
        box = torch.empty_like(found)
        sending = dist.isend(found, (rank + 1) % size)
        dist.recv(box, (rank - 1) % size)
        sending.wait()
        found = found.maximum(box)
    return found


def too_far(x):
    rank, size = who()
    found = [torch.empty_like(x) for _ in range(size)]
    found[rank] = x.clone()
    for step in range(size):
        sending = dist.isend(found[(rank - step) % size], (rank + 1) % size)
        dist.recv(found[(rank - step - 1) % size], (rank - 1) % size)
        sending.wait()
    return found


def with_the_library(x):
    found = [torch.empty_like(x) for _ in range(who()[1])]
    dist.all_gather(found, x)
    return found


def sends_first(x):
    rank, size = who()
    found = [x.clone() for _ in range(size)]
    for step in range(size - 1):
        dist.send(found[(rank - step) % size], (rank + 1) % size)
        dist.recv(found[(rank - step - 1) % size], (rank - 1) % size)
    return found


def into_x(x):
    rank, size = who()
    found = [torch.empty_like(x) for _ in range(size)]
    found[rank] = x.clone()
    for step in range(size - 1):
        box = torch.empty_like(x)
        sending = dist.isend(x, (rank + 1) % size)
        dist.recv(box, (rank - 1) % size)
        sending.wait()
        found[(rank - step - 1) % size] = box
        x.copy_(box)
    return found


def with_a_barrier(x):
    found = gathered(x)
    dist.barrier()
    return found


def without_handles(x):
    rank, size = who()
    found = [x.clone() for _ in range(size)]
    for step in range(size - 1):
        dist.isend(found[(rank - step) % size], (rank + 1) % size)
        dist.recv(found[(rank - step - 1) % size], (rank - 1) % size)
    return found


# -- rotate ----------------------------------------------------------------------------


def even_first(x):
    rank, size = who()
    box = torch.empty_like(x)
    if rank % 2 == 0:
        dist.send(x, (rank + 1) % size)
        dist.recv(box, (rank - 1) % size)
    else:
        dist.recv(box, (rank - 1) % size)
        dist.send(x, (rank + 1) % size)
    return box


def one_listens(x):
    rank, size = who()
    box = torch.empty_like(x)
    calls = [
        lambda: dist.send(x, (rank + 1) % size),
        lambda: dist.recv(box, (rank - 1) % size),
    ]
    for call in calls if rank > 0 else calls[::-1]:
        call()
    return box


def from_anyone(x):
    rank, size = who()
    box = torch.empty_like(x)
    if rank % 2 == 0:
        dist.send(x, (rank + 1) % size)
        dist.recv(box)
    else:
        dist.recv(box)
        dist.send(x, (rank + 1) % size)
    return box


def in_turn(x):
    rank, size = who()
    box = torch.empty_like(x)
    for turn in range(size):
        if rank == turn:
            dist.send(x, (rank + 1) % size)
        elif rank == (turn + 1) % size:
            dist.recv(box, turn)
        dist.barrier()
    return box


def all_send(x):
    rank, size = who()
    box = torch.empty_like(x)
    dist.send(x, (rank + 1) % size)
    dist.recv(box, (rank - 1) % size)
    return box


def all_listen(x):
    rank, size = who()
    box = torch.empty_like(x)
    dist.recv(box, (rank - 1) % size)
    dist.send(x, (rank + 1) % size)
    return box


def without_waiting(x):
    rank, size = who()
    box = torch.empty_like(x)
    sending = dist.isend(x, (rank + 1) % size)
    dist.recv(box, (rank - 1) % size)
    sending.wait()
    return box


def returns_x(x):
    even_first(x)
    return x


def to_the_left(x):
    rank, size = who()
    box = torch.empty_like(x)
    if rank % 2 == 0:
        dist.send(x, (rank - 1) % size)
        dist.recv(box, (rank + 1) % size)
    else:
        dist.recv(box, (rank + 1) % size)
        dist.send(x, (rank - 1) % size)
    return box


def gathers(x):
    return with_the_library(x)[who()[0] - 1]


def misspelt(x):
    return dist.sent(x)


RIGHT = {
    "sent_round_the_ring": [6_400_000, 6.4e6],
    "all_gather_in_a_ring": [gathered_in_turn, gathered_in_batches],
    "rotate_without_a_deadlock": [one_listens, from_anyone],
}

WRONG = {
    "sent_round_the_ring": [
        (1_600_000, "4 bytes"),
        (3_200_000, "the first of two rounds"),
        (12_800_000, "only what it sends"),
        (32_000_000, "all ranks send together"),
        (8_000_000, "keeps one chunk in each round"),
        (6_000_000, "this one has five"),
        (800_000, "one step"),
        (0, "one chunk"),
        (6.4, "these are MB, of 10**6 bytes; give bytes"),
        (4_000_000, "the tensor itself"),
        (16_000_000, "whole tensors; the ring sends chunks"),
        ("much", "give a number, not "),
        (None, "give a number, not a NoneType"),
        ("6400000", "give a number, not "),
        (-6_400_000, "not negative"),
        ([6_400_000], "give a number, not a list"),
    ],
    "all_gather_in_a_ring": [
        (by_arrival, "item 1 of rank 0 is the x of rank 3"),
        (always_its_own, "item 1 of rank 0 is the x of rank 3"),
        (to_everyone, "rank 0 sends to [1, 2, 3]"),
        (all_in_every_step, "only what has just come"),
        (too_far, "80 bytes in 4 messages"),
        (with_the_library, "calls the collective allgather"),
        (sends_first, "it hangs: ranks 0, 1, 2, 3"),
        (into_x, "own x has changed"),
        (with_a_barrier, "calls the collective barrier"),
        (without_handles, "did you wait for every handle?"),
        (lambda x: [x], "returns a list of 1"),
        (lambda x: x, "5 single numbers"),
        (lambda x: 3, "not a list"),
        (misspelt, "no attribute 'sent'"),
    ],
    "rotate_without_a_deadlock": [
        (all_send, "dist.send"),
        (all_listen, "dist.recv"),
        (without_waiting, "only the order may change"),
        (returns_x, "returns its own x"),
        (to_the_left, "its right neighbour"),
        (gathers, "allgather"),
        (in_turn, "barrier"),
        (misspelt, "no attribute 'sent'"),
    ],
}
