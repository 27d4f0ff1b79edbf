"""torchvision: a ResNet and a detector's operations on GPUs, with nn.DataParallel.

python -m simgpu --gpus 2 torchvision_train.py
"""

import torch
import torchvision
from torch import nn
from torchvision.transforms import v2


def network() -> nn.Module:
    torch.manual_seed(0)
    return torchvision.models.resnet18(num_classes=4)


def step(model: nn.Module, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(4, 3, 64, 64, generator=generator).to(device)
    classes = torch.arange(4, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.eval()  # DataParallel normalises each part by itself; so by neither here
    nn.functional.cross_entropy(model(images), classes).backward()
    optimizer.step()
    return model(images).detach().cpu()


def main() -> None:
    expected = step(network(), "cpu")
    found = step(nn.DataParallel(network().cuda()), "cuda")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    boxes = torch.tensor([[0, 0, 9, 9], [1, 1, 10, 10], [20, 20, 30, 30.0]])
    scores = torch.tensor([0.9, 0.8, 0.7])
    kept = torchvision.ops.nms(boxes.cuda(), scores.cuda(), 0.5)
    assert kept.is_cuda and kept.tolist() == [0, 2]
    features = torch.rand(1, 2, 16, 16)
    rois = torch.tensor([[0, 0.0, 0.0, 8.0, 8.0]])
    pooled = torchvision.ops.roi_align(features.cuda(1), rois.cuda(1), 4)
    assert pooled.device == torch.device("cuda", 1)
    expected = torchvision.ops.roi_align(features, rois, 4)
    torch.testing.assert_close(pooled.cpu(), expected)

    change = v2.Compose(
        [v2.RandomHorizontalFlip(1.0), v2.Normalize([0.5] * 3, [0.5] * 3)]
    )
    image = torch.rand(3, 8, 8)
    assert torch.equal(change(image.cuda()).cpu(), change(image))
    print("ok", flush=True)


main()
