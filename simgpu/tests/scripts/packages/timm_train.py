"""timm: a small ResNet on the ranks of torchrun, with DDP, autocast, mixup and an EMA.

torchrun --nproc-per-node=2 -m simgpu timm_train.py
"""

import contextlib
import os

import timm
import torch
import torch.distributed as dist
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, NativeScaler, accuracy, distribute_bn, reduce_tensor
from torch.nn.parallel import DistributedDataParallel

BATCH, CLASSES, STEPS = 4, 10, 2


def batches(rank: int):
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        images = torch.randn(2 * BATCH, 3, 64, 64, generator=generator)
        classes = torch.randint(0, CLASSES, (2 * BATCH,), generator=generator)
        yield images[rank::2], classes[rank::2]


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=CLASSES)


def train(model, device: str, rank: int | None, half: bool = False) -> float:
    """The last loss; without a rank, of all samples in one process."""
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.01, momentum=0.9)
    schedule = CosineLRScheduler(optimizer, t_initial=STEPS)
    scaler = NativeScaler(device) if half else None
    loss_of = LabelSmoothingCrossEntropy(0.1)
    both = zip(batches(0), batches(1), strict=True)
    pairs = batches(rank) if rank is not None else (
        [torch.cat(parts) for parts in zip(*pair, strict=True)] for pair in both
    )  # fmt: skip
    model.train()
    for step, (images, classes) in enumerate(pairs):
        images = images.to(device, memory_format=torch.channels_last)
        context = torch.autocast(device) if half else contextlib.nullcontext()
        with context:
            loss = loss_of(model(images), classes.to(device))
        optimizer.zero_grad()
        if scaler is not None:
            scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        else:
            loss.backward()
            optimizer.step()
        schedule.step(step + 1)
    return float(reduce_tensor(loss.detach(), 2) if rank is not None else loss)


def main() -> None:
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(network().to(device))
    model = DistributedDataParallel(model, device_ids=[rank])
    loss = train(model, "cuda", rank)
    alone = network()
    expected = train(alone, "cpu", None)
    assert abs(loss - expected) < 1e-4, (loss, expected)
    for name, weight in alone.state_dict().items():
        found = model.module.state_dict()[name].cpu()
        torch.testing.assert_close(found, weight, rtol=1e-3, atol=1e-4)

    # what has no counterpart in one process need only run
    half = DistributedDataParallel(network().to(device), device_ids=[rank])
    average = ModelEmaV3(half.module, decay=0.9)
    assert torch.isfinite(torch.tensor(train(half, "cuda", rank, half=True)))
    average.update(half.module)
    distribute_bn(half, 2, reduce=True)
    mix = Mixup(mixup_alpha=0.2, num_classes=CLASSES, label_smoothing=0.1)
    images, classes = next(batches(rank))
    images, targets = mix(images.cuda(), classes.cuda())
    output = average.module(images)
    assert SoftTargetCrossEntropy()(output, targets).is_cuda
    assert 0 <= float(accuracy(output, classes.cuda())[0]) <= 100
    dist.destroy_process_group()
    print("ok", flush=True)


main()
