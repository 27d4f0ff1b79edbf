"""Answers to the exercises of lesson 29: right ones, and planted wrong ones."""

import torch
from torch.nn.functional import cross_entropy


def to_own_gpu(path):
    return torch.load(path, map_location=f"cuda:{torch.cuda.current_device()}")


def to_cpu(path):
    return torch.load(path, map_location="cpu")


def as_it_was(path):
    return torch.load(path)


def to_gpu_0(path):
    return torch.load(path, map_location="cuda:0")


def zeros(path):
    return {name: value.zero_() for name, value in to_cpu(path).items()}


def in_numbers(model, batches):
    losses = [cross_entropy(model(x), y).item() for x, y in batches]
    return sum(losses) / len(losses)


def detached(model, batches):
    total = 0
    for x, y in batches:
        total += cross_entropy(model(x), y).detach()
    return total / len(batches)


def with_graph(model, batches):
    return torch.stack([cross_entropy(model(x), y) for x, y in batches]).mean()


def the_last(model, batches):
    return [cross_entropy(model(x), y).item() for x, y in batches][-1]


def emptied(model, batches):
    torch.cuda.empty_cache()
    return with_graph(model, batches)


def snake(lengths, rank, ranks):
    order = torch.argsort(lengths, descending=True).tolist()
    return [
        i for n, i in enumerate(order)
        if (n % ranks if n // ranks % 2 == 0 else ranks - 1 - n % ranks) == rank
    ]  # fmt: skip


def in_chunks(lengths, rank, ranks):
    return torch.argsort(lengths).chunk(ranks)[rank]


def as_they_come(lengths, rank, ranks):
    return torch.arange(len(lengths))[rank::ranks]


def everything(lengths, rank, ranks):
    return torch.argsort(lengths)


def all_to_rank_0(lengths, rank, ranks):
    return torch.argsort(lengths) if rank == 0 else []


def saves_a_list(path, *objects):
    torch.save([each.state_dict() for each in objects], path)


def loads_a_list(path, *objects):
    for each, state in zip(objects, to_own_gpu(path), strict=True):
        each.load_state_dict(state)


def loads_onto_gpu_0(path, *objects):
    for each, state in zip(objects, torch.load(path), strict=True):
        each.load_state_dict(state)


def loads_the_model(path, model, optimizer, scheduler):
    model.load_state_dict(to_cpu(path)[0])


def loads_no_scheduler(path, model, optimizer, scheduler):
    model.load_state_dict(to_cpu(path)[0])
    optimizer.load_state_dict(to_cpu(path)[1])


def loads_no_optimizer(path, model, optimizer, scheduler):
    model.load_state_dict(to_cpu(path)[0])
    scheduler.load_state_dict(to_cpu(path)[2])


def loads_nothing(path, model, optimizer, scheduler):
    pass


_E, _F, _G, _H = "loaded on GPU 0", "graph kept", "uneven work", "no optimizer state"

RIGHT = {
    "memory_incidents": [(_E, to_own_gpu, _F, in_numbers), (_E, to_cpu, _F, detached)],
    "slow_rank": [(_G, snake)],
    "resume_incident": [(_H, saves_a_list, loads_a_list)],
}

WRONG = {
    "memory_incidents": [
        (("device not set", to_cpu, _F, detached), "cuda:1 to cuda:3 would have"),
        ((_E, to_cpu, "cache", detached), "not only reserved"),
        ((_E, to_cpu, "leak", detached), "not in the table"),
        ((_E, as_it_was, _F, detached), "bytes on another GPU"),
        ((_E, as_it_was, "later", with_graph), "bytes on another GPU"),
        ((_E, to_gpu_0, _F, detached), "bytes on another GPU"),
        ((_E, zeros, _F, detached), "values are not those of the file"),
        ((_E, to_cpu, _F, with_graph), "bytes stay after each call"),
        ((_E, to_cpu, _F, emptied), "bytes stay after each call"),
        ((_E, to_cpu, _F, the_last), "the mean loss is"),
        ((_E, "to_cpu", _F, detached), "give a function"),
    ],
    "slow_rank": [
        (("slow link", snake), "because they wait"),
        (("stuck rank", snake), "comes to its end"),
        ((_G, in_chunks), "so some must wait"),
        ((_G, as_they_come), "so some must wait"),
        ((_G, everything), "each sequence once"),
        ((_G, all_to_rank_0), "give each equally many"),
        ((_G, lambda lengths, rank, ranks: "all"), "returns the positions"),
    ],
    "resume_incident": [
        (("one shard", saves_a_list, loads_a_list), "right after loading"),
        (("bad batch", saves_a_list, loads_a_list), "has had the same batch"),
        ((_H, saves_a_list, loads_the_model), "AdamW's moments"),
        ((_H, saves_a_list, loads_no_optimizer), "AdamW's moments"),
        ((_H, saves_a_list, loads_no_scheduler), "still thinks"),
        ((_H, saves_a_list, loads_nothing), "the parameters are not those"),
        ((_H, saves_a_list, loads_onto_gpu_0), "incident E again"),
    ],
}  # fmt: skip
