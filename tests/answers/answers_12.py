"""Answers to the exercises of lesson 12: right ones, and wrong ones with the reason."""

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


def with_a_number_more(x):
    """As with the lesson's own send and receive."""
    return [letter[:-1] for letter in gathered(torch.cat([x, x.new_zeros(1)]))]


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
    "sent_round_the_ring": [lambda: (6_400_000,), lambda: (6.4e6,)],
    "all_gather_in_a_ring": [
        lambda: (gathered,),
        lambda: (gathered_in_turn,),
        lambda: (gathered_in_batches,),
    ],
    "rotate_without_a_deadlock": [
        lambda: (even_first,),
        lambda: (one_listens,),
        lambda: (from_anyone,),
    ],
}
WRONG = {
    "sent_round_the_ring": [
        (lambda: (1_600_000,), "4 bytes"),
        (lambda: (3_200_000,), "one half"),
        (lambda: (12_800_000,), "only what it sends"),
        (lambda: (32_000_000,), "all ranks together"),
        (lambda: (8_000_000,), "one complete chunk"),
        (lambda: (6_000_000,), "this one has five"),
        (lambda: (800_000,), "one step"),
        (lambda: (0,), "one chunk"),
        (lambda: (6.4,), "not in MB"),
        (lambda: (4_000_000,), "the whole tensor once"),
        (lambda: (16_000_000,), "whole tensors; the ring sends chunks"),
        (lambda: ("much",), "one number of bytes, not a str"),
        (lambda: (None,), "one number of bytes, not a NoneType"),
        (lambda: ("6400000",), "one number of bytes, not a str"),
        (lambda: (-6_400_000,), "not negative"),
        (lambda: ([6_400_000],), "one number of bytes, not a list"),
    ],
    "all_gather_in_a_ring": [
        (lambda: (by_arrival,), "item 1 of rank 0 is the x of rank 3"),
        (lambda: (always_its_own,), "item 1 of rank 0 is the x of rank 3"),
        (lambda: (to_everyone,), "rank 0 sends to [1, 2, 3]"),
        (lambda: (all_in_every_step,), "only what has just come"),
        (lambda: (too_far,), "80 bytes in 4 messages"),
        (lambda: (with_the_library,), "calls the collective allgather"),
        (lambda: (sends_first,), "it hangs: ranks 0, 1, 2, 3"),
        (lambda: (into_x,), "own x has changed"),
        (lambda: (with_a_barrier,), "calls the collective barrier"),
        (lambda: (with_a_number_more,), "one number too long"),
        (lambda: (without_handles,), "did you wait for every handle?"),
        (lambda: (lambda x: [x],), "returns a list of 1"),
        (lambda: (lambda x: x,), "5 single numbers"),
        (lambda: (lambda x: 3,), "not a list"),
        (lambda: (misspelt,), "no attribute 'sent'"),
    ],
    "rotate_without_a_deadlock": [
        (lambda: (all_send,), "dist.send"),
        (lambda: (all_listen,), "dist.recv"),
        (lambda: (without_waiting,), "only the order may change"),
        (lambda: (returns_x,), "returns its own x"),
        (lambda: (to_the_left,), "its right neighbour"),
        (lambda: (gathers,), "allgather"),
        (lambda: (in_turn,), "barrier"),
        (lambda: (misspelt,), "no attribute 'sent'"),
    ],
}
