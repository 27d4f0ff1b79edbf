"""Answers to the exercises of lesson 15: right ones, and planted wrong ones."""

import torch
import torch.distributed as dist


def who():
    return dist.get_rank(), dist.get_world_size()


# -- any rank --------------------------------------------------------------------------


def by_maximum(found):
    largest = torch.tensor([int(found)])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest > 0


def by_objects(found):
    all_found = [None] * who()[1]
    dist.all_gather_object(all_found, found)
    return any(all_found)


def only_who_found(found):
    if found:
        dist.all_reduce(torch.ones(1))
    return found


def exactly_one(found):
    count = torch.tensor([int(found)])
    dist.all_reduce(count)
    return count.item() == 1


def a_count(found):
    count = torch.tensor([int(found)])
    dist.all_reduce(count)
    return count.item()


def told_by_who_found(found):
    """Rank 0 never hears of it: all ranks only have what they found."""
    return found


# -- one hop: a message to the right, and one from the left ----------------------------


def at_once(outgoing, incoming):
    rank, size = who()
    sending = dist.isend(outgoing, (rank + 1) % size)
    dist.recv(incoming, (rank - 1) % size)
    sending.wait()


def batched(outgoing, incoming):
    rank, size = who()
    pair = [
        dist.P2POp(dist.isend, outgoing, (rank + 1) % size),
        dist.P2POp(dist.irecv, incoming, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(pair):
        work.wait()


def is_even(rank):
    return rank % 2 == 0


def in_order(sends_first, to=1):
    """Blocking calls: the ranks for which `sends_first` holds send before they receive.

    They send `to` so many ranks further on.
    """

    def hop(outgoing, incoming):
        rank, size = who()
        calls = [
            lambda: dist.send(outgoing, (rank + to) % size),
            lambda: dist.recv(incoming, (rank - to) % size),
        ]
        for call in calls if sends_first(rank) else calls[::-1]:
            call()

    return hop


def from_anyone(outgoing, incoming):
    rank, size = who()
    if is_even(rank):
        dist.send(outgoing, (rank + 1) % size)
        dist.recv(incoming)
    else:
        dist.recv(incoming)
        dist.send(outgoing, (rank + 1) % size)


# -- all_gather ------------------------------------------------------------------------


def gather_by(hop, more=0):
    """An all-gather in a ring of such hops, and so many hops more."""

    def gather(x):
        rank, size = who()
        found = [x.clone() for _ in range(size)]
        for step in range(size - 1 + more):
            hop(found[(rank - step) % size], found[(rank - step - 1) % size])
        return found

    return gather


gathered = gather_by(at_once)


def gathered_in_turn(x):
    """Blocking calls only; the result is one tensor."""
    return torch.stack(gather_by(in_order(is_even))(x))


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
        at_once(found, box)
        found = found.maximum(box)
    return found


def with_the_library(x):
    found = [torch.empty_like(x) for _ in range(who()[1])]
    dist.all_gather(found, x)
    return found


def into_x(x):
    def hop(outgoing, incoming):
        at_once(x, incoming)
        x.copy_(incoming)

    return gather_by(hop)(x)


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


def rotate_by(hop):
    def rotate(x):
        box = torch.empty_like(x)
        hop(x, box)
        return box

    return rotate


def all_send(x):
    rank, size = who()
    box = torch.empty_like(x)
    dist.send(x, (rank + 1) % size)  # the reason names this line
    dist.recv(box, (rank - 1) % size)
    return box


def all_listen(x):
    rank, size = who()
    box = torch.empty_like(x)
    dist.recv(box, (rank - 1) % size)
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


def returns_x(x):
    rotate_by(in_order(is_even))(x)
    return x


def misspelt(x):
    return dist.sent(x)


RIGHT = {
    "any_rank": [by_maximum, by_objects],
    "all_gather_in_a_ring": [gathered_in_turn, gather_by(batched)],
    "rotate_without_a_deadlock": [
        rotate_by(in_order(lambda rank: rank > 0)),
        rotate_by(from_anyone),
    ],
}

WRONG = {
    "any_rank": [
        (only_who_found, "does every rank make every call?"),
        (told_by_who_found, "rank 0 returns False, and `found` is True on [2]"),
        (exactly_one, "rank 0 returns False, and `found` is True on [0, 1, 2, 3]"),
        (lambda found: True, "rank 0 returns True, and `found` is True on no rank"),
        (a_count, "rank 0 returns a value of type int; return a bool"),
        (misspelt, "no attribute 'sent'"),
        (None, "give a function"),
    ],
    "all_gather_in_a_ring": [
        (
            lambda x: gather_by(lambda outgoing, incoming: at_once(x, incoming))(x),
            "item 1 of rank 0 is the x of rank 3",
        ),
        (to_everyone, "rank 0 sends to [1, 2, 3]"),
        (all_in_every_step, "only what has just come"),
        (gather_by(at_once, more=1), "80 bytes in 4 messages"),
        (with_the_library, "calls the collective allgather"),
        (gather_by(in_order(lambda rank: True)), "it hangs: ranks 0, 1, 2, 3"),
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
        (rotate_by(at_once), "only the order may change"),
        (returns_x, "returns its own x"),
        (rotate_by(in_order(is_even, to=-1)), "its right neighbour"),
        (lambda x: with_the_library(x)[who()[0] - 1], "allgather"),
        (in_turn, "barrier"),
        (misspelt, "no attribute 'sent'"),
    ],
}
