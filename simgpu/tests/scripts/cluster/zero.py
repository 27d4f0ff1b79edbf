"""ZeroRedundancyOptimizer with DDP: each rank has a part of the optimizer's state."""

import copy

import torch
from common import GPT, agree, agree_on, batches, join, leave, loss_of
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

rank, ranks, device = join()
settings = {"lr": 1e-2, "eps": 1e-3}
torch.manual_seed(0)
start = GPT().to(device)

for options in (
    {},
    {"parameters_as_bucket_view": True},
    {"bucket_cap_mb": 0.01, "gradient_as_bucket_view": True},
):
    for_ddp = {k: v for k, v in options.items() if k != "parameters_as_bucket_view"}
    for_zero = {k: v for k, v in options.items() if k not in for_ddp}
    reference = copy.deepcopy(start)
    model = DDP(copy.deepcopy(start), device_ids=[rank], **for_ddp)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, **for_zero, **settings
    )
    expected = torch.optim.AdamW(reference.parameters(), **settings)
    data = batches(4, 2 * ranks, device=device)
    for step, batch in enumerate(data):
        for one, by, rows in (
            (model, optimizer, batch.chunk(ranks)[rank]),
            (reference, expected, batch),
        ):
            by.zero_grad()
            loss_of(one, rows).backward()
            by.step()
        agree_on(f"{options}, step {step}", model.module, reference)

    held = sum(
        state["exp_avg"].numel() for state in optimizer.optim.state.values() if state
    )
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert 0 < held < 2 * numbers / ranks, (held, numbers)
    optimizer.consolidate_state_dict(to=0)  # a checkpoint is one rank's
    if rank == 0:
        state, whole = optimizer.state_dict()["state"], expected.state_dict()["state"]
        assert len(state) == len(whole) == len(list(model.parameters()))
        for i in whole:
            agree(f"exp_avg {i}", state[i]["exp_avg"].to(device), whole[i]["exp_avg"])

leave(f"zero: {ranks} ranks, {held} of {numbers} numbers here")
