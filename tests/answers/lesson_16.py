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


def divided_by(count, first=lambda model: None):
    def average(model):
        first(model)
        for p in model.parameters():
            p.grad /= count or dist.get_world_size()

    return average


def with_avg(model):
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)


def first_only(model):
    p = next(model.parameters())
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()


def clears(model):
    summed(model)
    model.zero_grad()


# -- hooks -----------------------------------------------------------------------------


def averaging(prepare, finish=torch.Tensor.float):
    """A hook that adds up `prepare(buffer)` and holds `finish` of the sum."""

    def hook(state, bucket):
        small = prepare(bucket.buffer())
        future = dist.all_reduce(small, async_op=True).get_future()
        return future.then(lambda f: finish(f.value()[0]))

    return hook


def share(gradients):
    return gradients.bfloat16() / dist.get_world_size()


def in_bfloat16(gradients):
    return gradients.bfloat16()


def divided(total):
    return total.float() / dist.get_world_size()


def hook(state, bucket):
    work = dist.all_reduce(share(bucket.buffer()), async_op=True)
    return work.get_future().then(lambda f: bucket.buffer().copy_(f.value()[0]))


def waits(state, bucket):
    small = bucket.buffer().to(torch.bfloat16)
    dist.all_reduce(small)
    future = torch.futures.Future()
    future.set_result(small.float() / dist.get_world_size())
    return future


def guarded(state, bucket):
    if bucket is None:
        return None
    return hook(state, bucket)


def sends_nothing(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer().bfloat16().float())
    return future


def throws_the_result_away(state, bucket):
    return averaging(share, lambda total: bucket.buffer())(state, bucket)


def no_future(state, bucket):
    dist.all_reduce(bucket.buffer().bfloat16())
    return bucket.buffer()


def forgets_to_return(state, bucket):
    hook(state, bucket)


def without_then(state, bucket):
    return dist.all_reduce(share(bucket.buffer()), async_op=True).get_future()


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
    "send_bfloat16": [
        hook,
        averaging(in_bfloat16, divided),
        waits,
        averaging(share, lambda total: total),
        guarded,
    ],
}

WRONG = {
    "average_by_sum": [
        (sum_only, "the sum over the ranks"),
        (divided_by(2, sum_only), "ask how many"),
        (divided_by(None, summed), "divided twice"),
        (with_avg, "this time without AVG"),
        (divided_by(None), "nothing is added up"),
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
        (averaging(lambda x: share(x).float()), "as many as without a hook"),
        (averaging(lambda x: x.half() / dist.get_world_size()), "not bfloat16"),
        (averaging(in_bfloat16), "a mean is wanted"),
        (averaging(share, divided), "divided twice"),
        (sends_nothing, "nothing was sent"),
        (throws_the_result_away, "has it arrived"),
        (no_future, "the hook returned Tensor; DDP wants a future"),
        (forgets_to_return, "the hook returned NoneType"),
        (without_then, "holds a list; take [0] with .then"),
        (lambda state, b: hook(state, b), "call the second parameter `bucket`"),
        (averaging(lambda x: x.bfloat16() / 2), "1.50 times the mean over 3 ranks"),
        (averaging(lambda x: x.bfloat16() / 4), "0.75 times the mean over 3 ranks"),
        (gathers, "it uses all_gather"),
        (one_number, "holds 1 numbers instead of"),
        (None, "a function is wanted"),
    ],
}
