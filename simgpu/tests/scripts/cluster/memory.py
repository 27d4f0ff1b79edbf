"""FSDP2's peak of memory beside what PyTorch's own tracker of tensors says."""

import gc

import torch
from common import GPT, TOKENS, join, leave, loss_of
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

rank, ranks, device = join()
one = torch.ones(2, 2, device=device, requires_grad=True)
(one @ one).sum().backward()  # takes what cuBLAS keeps, for forward and for backward
half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def peaks(policy: MixedPrecisionPolicy, reshard: bool) -> tuple[int, int]:
    """Bytes at the peak of two steps: as the tracker sums up, as CUDA counts."""
    gc.collect()  # the model before, which is in circles
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    with device:
        model = GPT(blocks=4, width=256, length=64)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, reshard_after_forward=reshard, mp_policy=policy)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    batch = torch.randint(0, TOKENS, (8, 64), device=device)
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((batch,))
    torch.cuda.reset_peak_memory_stats()
    with tracker:
        for step in range(2):
            if step:
                tracker.reset_mod_stats()
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    said = tracker.get_tracker_snapshot("peak")[device]["Total"]
    return said, torch.cuda.max_memory_allocated() - before


for policy in (MixedPrecisionPolicy(), half):
    for reshard in (True, False):
        said, counted = peaks(policy, reshard)
        # the tracker does not see what a sum takes while it runs
        assert abs(counted / said - 1) < 0.02, (policy, reshard, said, counted)
free, total = torch.cuda.mem_get_info()
assert total - torch.cuda.memory_reserved() - free > 2**28  # the context, and NCCL's
leave(f"memory: {ranks} ranks")
