"""Score many images on all GPUs of a machine, in one process.

    python score_all.py

Each GPU gets a copy of the model, and the GPUs take the batches in turns. Works with
any number of GPUs, and on the CPU where there is none. The scores go to scores.pt, in
the order of the images. Used in lesson 00.
"""

import copy

import torch
from torch import nn

torch.manual_seed(0)
BATCH = 1024  # images that a GPU scores at once; have at least one batch for each GPU
images = torch.randn(20_000, 64)  # your data, in the host's memory
model = nn.Sequential(  # your trained model
    nn.Linear(64, 1024),
    nn.ReLU(),
    nn.Linear(1024, 1024),
    nn.ReLU(),
    nn.Linear(1024, 10),
).eval()

devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
devices = devices or [torch.device("cpu")]
replicas = [copy.deepcopy(model).to(device) for device in devices]

taken = [0] * len(devices)
scores = []
with torch.inference_mode():
    for number, batch in enumerate(images.split(BATCH)):
        turn = number % len(devices)
        scores.append(replicas[turn](batch.to(devices[turn])))
        taken[turn] += len(batch)
    # fetched at the end, because fetching waits until a GPU is done
    scores = torch.cat([part.cpu() for part in scores])
    on_cpu = model(images[:BATCH])

for device, count in zip(devices, taken, strict=True):
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else "no GPU found"
    print(f"{str(device):7} {name}: {count:,} images, {count / len(images):.0%}")
difference = (scores[:BATCH] - on_cpu).abs().max().item()
print(f"largest difference from the CPU in the first batch: {difference:.0e}")
torch.save(scores, "scores.pt")
print(f"{len(scores):,} images scored, saved in scores.pt")
