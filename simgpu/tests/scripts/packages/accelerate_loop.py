"""accelerate on the ranks of a launcher: prepare, accumulate, gather, save and load.

python -m simgpu --gpus 2 accelerate launch --num_processes 2 accelerate_loop.py
python -m simgpu --gpus 2 accelerate_loop.py no notebook
torchrun --nproc-per-node=2 -m simgpu accelerate_loop.py bf16
torchrun --nproc-per-node=2 -m simgpu accelerate_loop.py no fsdp2
"""

import sys

import digits
import torch
from accelerate import Accelerator, notebook_launcher
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    broadcast_object_list,
    gather_object,
    set_seed,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    precision = sys.argv[1] if len(sys.argv) > 1 else "no"
    plugin = None
    if "fsdp2" in sys.argv:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(
        mixed_precision=precision, gradient_accumulation_steps=2, fsdp_plugin=plugin
    )
    set_seed(3)
    assert accelerator.num_processes == 2, accelerator.state
    assert accelerator.device == torch.device("cuda", accelerator.local_process_index)
    model = digits.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=digits.LEARNING_RATE)
    loader = DataLoader(TensorDataset(*digits.data()), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []
    for samples, classes in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(samples), classes)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1e3)
            optimizer.step()
            optimizer.zero_grad()
        seen.append(accelerator.gather_for_metrics(classes))
    found = torch.cat(seen).cpu()
    assert torch.equal(found.sort().values, digits.data()[1].sort().values)
    assert gather_object([accelerator.process_index]) == [0, 1]
    assert broadcast_object_list([accelerator.process_index]) == [0]
    total = accelerator.reduce(torch.ones(3, device=accelerator.device))
    assert total.tolist() == [2, 2, 2]
    padded = accelerator.pad_across_processes(
        torch.ones(1 + accelerator.process_index, device=accelerator.device)
    )
    assert padded.shape == (2,)
    accelerator.save_state("state")
    accelerator.wait_for_everyone()
    before = accelerator.get_state_dict(model)
    with torch.no_grad():
        accelerator.unwrap_model(model)[0].weight.zero_()
    accelerator.load_state("state")
    after = accelerator.get_state_dict(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    tolerance = 1e-5 if precision == "no" else 2e-2
    if accelerator.is_main_process:
        digits.compare(after, batch=8, tolerance=tolerance)
    accelerator.end_training()


if __name__ == "__main__":
    if "start" in sys.argv:  # as in a notebook, before anything has looked at GPUs
        import simgpu

        simgpu.start(2)
    if "notebook" in sys.argv:
        notebook_launcher(main, num_processes=2)
    else:
        main()
