"""Answers to the exercises of lesson 16: right ones, and planted wrong ones."""

import torch
import torch.distributed as dist

NUMBERS = 256 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 100 + 100


def summed(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def divides_first(model):
    for p in model.parameters():
        p.grad = p.grad / dist.get_world_size()
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)


def sum_only(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)


def halved(model):
    sum_only(model)
    for p in model.parameters():
        p.grad /= 2


def divided_twice(model):
    summed(model)
    for p in model.parameters():
        p.grad /= dist.get_world_size()


def with_avg(model):
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)


def only_divides(model):
    for p in model.parameters():
        p.grad /= dist.get_world_size()


def first_only(model):
    p = next(model.parameters())
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()


def clears(model):
    summed(model)
    model.zero_grad()


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
    "average_by_sum": [summed, divides_first],
    "messages_and_bytes": [(4, 8 * NUMBERS)],
    "send_bfloat16": [hook, divides_later, waits, stays_bfloat16, guarded],
}

WRONG = {
    "average_by_sum": [
        (sum_only, "the sum over the ranks"),
        (halved, "ask how many"),
        (divided_twice, "divided twice"),
        (with_avg, "this time without AVG"),
        (only_divides, "nothing is added up"),
        (first_only, "a later one is not"),
        (clears, "no `.grad` any more"),
        (3, "give a function"),
    ],
    "messages_and_bytes": [
        ((12, 8 * NUMBERS), "it sends buckets"),
        ((6, 8 * NUMBERS), "does not fill a bucket"),
        ((2, 4 * NUMBERS), "nothing says `no_sync`"),
        ((1, 4 * NUMBERS), "only the first step"),
        ((5, 4 * NUMBERS), "count the buckets"),
        ((4, 4 * NUMBERS), "that is one `backward()`"),
        ((4, 2 * NUMBERS), "4 bytes"),
        ((4, 8 * (NUMBERS - 2148)), "biases"),
        ((4, 16 * NUMBERS), "not those of all"),
        ((4, 17), "4 bytes for each parameter"),
        ((None, None), "give a number"),
        (("4", 8 * NUMBERS), "give a number"),
        ((4, [8 * NUMBERS]), "give a number"),
    ],
    "send_bfloat16": [
        (sends_float32, "as many as without a hook"),
        (sends_fp16, "not bfloat16"),
        (sums, "a mean is wanted"),
        (divides_twice, "divided twice"),
        (sends_nothing, "nothing was sent"),
        (throws_the_result_away, "has it arrived"),
        (no_future, "the hook returned Tensor; DDP wants a future"),
        (forgets_to_return, "the hook returned NoneType"),
        (without_then, "holds a list; take [0] with .then"),
        (other_name, "call the second parameter `bucket`"),
        (divides_by(2), "1.50 times the mean over 3 ranks"),
        (divides_by(4), "0.75 times the mean over 3 ranks"),
        (gathers, "it uses all_gather"),
        (one_number, "holds 1 numbers instead of"),
        (None, "a function is wanted"),
    ],
}
