"""Answers to the exercises of lesson 13: right ones, and wrong ones with the reason."""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

NUMBERS = 256 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 100 + 100


def loop(model, rows, epochs, sampler, told=True, scale=1.0, lr=0.5, workers=0):
    loader = DataLoader(rows, batch_size=16, sampler=sampler, num_workers=workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for epoch in range(epochs):
        if told:
            sampler.set_epoch(epoch)
        for x, y in loader:
            loss = cross_entropy(model(x), y) * scale
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def repaired(model, data, epochs):
    loop(model, data, epochs, DistributedSampler(data))


def another_seed(model, data, epochs):
    loop(model, data, epochs, DistributedSampler(data, seed=7))


def as_found(model, data, epochs):
    loop(model, data, epochs, DistributedSampler(data), told=False, scale=1 / 2)


def untold(model, data, epochs):
    loop(model, data, epochs, DistributedSampler(data), told=False)


def told_once(model, data, epochs):
    sampler = DistributedSampler(data)
    loop(model, data, 1, sampler)
    sampler.set_epoch(1)
    loop(model, data, epochs - 1, sampler, told=False)


def divided(model, data, epochs):
    loop(model, data, epochs, DistributedSampler(data), scale=1 / 2)


def multiplied(model, data, epochs):
    loop(model, data, epochs, DistributedSampler(data), scale=2)


def without_ddp(model, data, epochs):
    loop(model.module, data, epochs, DistributedSampler(data))


def everyone_all(model, data, epochs):
    loop(model, data, epochs, DistributedSampler(data, num_replicas=1, rank=0))


def another_rate(model, data, epochs):
    loop(model, data, epochs, DistributedSampler(data), lr=0.1)


def with_workers(model, data, epochs):
    loop(model, data, epochs, DistributedSampler(data), workers=1)


def raises(model, data, epochs):
    raise KeyError("sampler")


def empty(model, data, epochs): ...


def hook(state, bucket):
    small = bucket.buffer().bfloat16() / dist.get_world_size()
    work = dist.all_reduce(small, async_op=True)
    return work.get_future().then(lambda f: bucket.buffer().copy_(f.value()[0]))


def divides_later(state, bucket):
    future = dist.all_reduce(bucket.buffer().bfloat16(), async_op=True).get_future()
    return future.then(lambda f: f.value()[0].float() / dist.get_world_size())


def waits(state, bucket):
    small = bucket.buffer().to(torch.bfloat16)
    dist.all_reduce(small)
    future = torch.futures.Future()
    future.set_result(small.float() / dist.get_world_size())
    return future


def stays_bfloat16(state, bucket):
    small = bucket.buffer().bfloat16() / dist.get_world_size()
    future = dist.all_reduce(small, async_op=True).get_future()
    return future.then(lambda f: f.value()[0])


def guarded(state, bucket):
    if bucket is None:
        return None
    return hook(state, bucket)


def sends_float32(state, bucket):
    big = bucket.buffer().bfloat16().float() / dist.get_world_size()
    future = dist.all_reduce(big, async_op=True).get_future()
    return future.then(lambda f: f.value()[0])


def sends_fp16(state, bucket):
    small = bucket.buffer().half() / dist.get_world_size()
    future = dist.all_reduce(small, async_op=True).get_future()
    return future.then(lambda f: f.value()[0].float())


def sums(state, bucket):
    future = dist.all_reduce(bucket.buffer().bfloat16(), async_op=True).get_future()
    return future.then(lambda f: f.value()[0].float())


def divides_twice(state, bucket):
    small = bucket.buffer().bfloat16() / dist.get_world_size()
    future = dist.all_reduce(small, async_op=True).get_future()
    return future.then(lambda f: f.value()[0].float() / dist.get_world_size())


def sends_nothing(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer().bfloat16().float())
    return future


def throws_the_result_away(state, bucket):
    small = bucket.buffer().bfloat16() / dist.get_world_size()
    future = dist.all_reduce(small, async_op=True).get_future()
    return future.then(lambda f: bucket.buffer())


def no_future(state, bucket):
    dist.all_reduce(bucket.buffer().bfloat16())
    return bucket.buffer()


def forgets_to_return(state, bucket):
    small = bucket.buffer().bfloat16() / dist.get_world_size()
    dist.all_reduce(small, async_op=True).get_future().then(lambda f: f.value()[0])


def without_then(state, bucket):
    small = bucket.buffer().bfloat16() / dist.get_world_size()
    return dist.all_reduce(small, async_op=True).get_future()


def other_name(state, b):
    return hook(state, b)


def divides_by(count):
    def fixed(state, bucket):
        small = bucket.buffer().bfloat16() / count
        future = dist.all_reduce(small, async_op=True).get_future()
        return future.then(lambda f: f.value()[0].float())

    return fixed


def gathers(state, bucket):
    small = bucket.buffer().bfloat16()
    all_of_them = [torch.empty_like(small) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, small)
    future = torch.futures.Future()
    future.set_result(torch.stack(all_of_them).float().mean(0))
    return future


def one_number(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer()[:1])
    return future


RIGHT = {
    "messages_and_bytes": [lambda: (4, 8 * NUMBERS)],
    "train_right": [lambda: (repaired,), lambda: (another_seed,)],
    "send_bfloat16": [
        lambda: (hook,),
        lambda: (divides_later,),
        lambda: (waits,),
        lambda: (stays_bfloat16,),
        lambda: (guarded,),
    ],
}
WRONG = {
    "messages_and_bytes": [
        (lambda: (12, 8 * NUMBERS), "it sends buckets"),
        (lambda: (6, 8 * NUMBERS), "does not fill a bucket"),
        (lambda: (2, 4 * NUMBERS), "nothing says `no_sync`"),
        (lambda: (1, 4 * NUMBERS), "only the first step"),
        (lambda: (5, 4 * NUMBERS), "count the buckets"),
        (lambda: (4, 4 * NUMBERS), "that is one `backward()`"),
        (lambda: (4, 2 * NUMBERS), "4 bytes"),
        (lambda: (4, 8 * (NUMBERS - 2148)), "biases"),
        (lambda: (4, 16 * NUMBERS), "not those of all"),
        (lambda: (4, 17), "4 bytes for each parameter"),
        (lambda: (None, None), "two numbers are wanted"),
        (lambda: ("4", 8 * NUMBERS), "two numbers are wanted"),
        (lambda: (4, [8 * NUMBERS]), "two numbers are wanted"),
    ],
    "train_right": [
        (lambda: (as_found,), "epochs 0 and 1 have the same order"),
        (lambda: (untold,), "epochs 0 and 1 have the same order"),
        (lambda: (told_once,), "epochs 1 and 2 have the same order"),
        (lambda: (divided,), "which DDP does already"),
        (lambda: (multiplied,), "too large"),
        (lambda: (without_ddp,), "different weights"),
        (lambda: (everyone_all,), "each has half of 64"),
        (lambda: (another_rate,), "keep SGD"),
        (lambda: (with_workers,), "leave `num_workers` at 0"),
        (lambda: (raises,), "KeyError: 'sampler'"),
    ],
    "send_bfloat16": [
        (lambda: (sends_float32,), "as many as without a hook"),
        (lambda: (sends_fp16,), "not bfloat16"),
        (lambda: (sums,), "a mean is wanted"),
        (lambda: (divides_twice,), "divided twice"),
        (lambda: (sends_nothing,), "nothing was sent"),
        (lambda: (throws_the_result_away,), "has it arrived"),
        (lambda: (no_future,), "the hook returned Tensor; DDP wants a future"),
        (lambda: (forgets_to_return,), "the hook returned NoneType"),
        (lambda: (without_then,), "holds a list; take [0] with .then"),
        (lambda: (other_name,), "call the second parameter `bucket`"),
        (lambda: (divides_by(2),), "1.50 times the mean over 3 ranks"),
        (lambda: (divides_by(4),), "0.75 times the mean over 3 ranks"),
        (lambda: (gathers,), "it uses all_gather"),
        (lambda: (one_number,), "holds 1 numbers instead of"),
        (lambda: (None,), "a function is wanted"),
    ],
}
