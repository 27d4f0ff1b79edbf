"""Small networks for pictures, as their papers have them, each trained for two steps.

One of `NETS`, with contiguous tensors or channels-last, in float32 or under autocast.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

CLASSES, WIDTH = 10, 16


def conv(given: int, made: int, size: int = 3, stride: int = 1, groups: int = 1):
    layer = nn.Conv2d(given, made, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(made))


class Bottleneck(nn.Module):
    """Of ResNet-50: He and others, 2015."""

    def __init__(self, given: int, width: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            conv(given, width, 1), nn.ReLU(inplace=True),
            conv(width, width, 3, stride), nn.ReLU(inplace=True),
            conv(width, 4 * width, 1),
        )  # fmt: skip
        self.short = conv(given, 4 * width, 1, stride)

    def forward(self, x):
        return F.relu(self.body(x) + self.short(x), inplace=True)


def resnet() -> nn.Module:
    stem = conv(3, WIDTH, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    blocks = Bottleneck(WIDTH, WIDTH, 1), Bottleneck(4 * WIDTH, 2 * WIDTH, 2)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * WIDTH, CLASSES)
    return nn.Sequential(*stem, *blocks, *head)


class Layered(nn.Module):
    """Of ConvNeXt: Liu and others, 2022. LayerNorm where channels come last."""

    def __init__(self, width: int):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.body = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.body(y)).permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    down = nn.Conv2d(WIDTH, 2 * WIDTH, 2, 2)
    stages = nn.Conv2d(3, WIDTH, 4, 4), Layered(WIDTH), down, Layered(2 * WIDTH)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * WIDTH, CLASSES)
    return nn.Sequential(*stages, *head)


class Inverted(nn.Module):
    """Of EfficientNet: Tan and Le, 2019, with squeeze and excitation."""

    def __init__(self, given: int, made: int, stride: int):
        super().__init__()
        inner, few = 4 * given, max(given // 4, 1)
        self.first = nn.Sequential(
            conv(given, inner, 1), nn.SiLU(inplace=True),
            conv(inner, inner, 5, stride, inner), nn.SiLU(inplace=True),
        )  # fmt: skip
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(inner, few, 1), nn.SiLU(inplace=True),
            nn.Conv2d(few, inner, 1), nn.Sigmoid(),
        )  # fmt: skip
        self.last = conv(inner, made, 1)

    def forward(self, x):
        y = self.first(x)
        y = self.last(y * self.squeeze(y))
        return x + y if x.shape == y.shape else y


def efficientnet() -> nn.Module:
    stem = conv(3, WIDTH, 3, 2), nn.SiLU(inplace=True)
    blocks = Inverted(WIDTH, WIDTH, 1), Inverted(WIDTH, 2 * WIDTH, 2)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * WIDTH, CLASSES)
    return nn.Sequential(*stem, *blocks, *head)


class UNet(nn.Module):
    """Ronneberger and others, 2015: down, up again, and a class for each pixel."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(conv(3, WIDTH), nn.ReLU())
        self.deep = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(WIDTH, 2 * WIDTH, 3, padding=2, dilation=2),
            nn.GroupNorm(4, 2 * WIDTH), nn.ReLU(),
        )  # fmt: skip
        self.up = nn.ConvTranspose2d(2 * WIDTH, WIDTH, 2, 2)
        self.last = nn.Sequential(
            conv(2 * WIDTH, WIDTH), nn.ReLU(), nn.Conv2d(WIDTH, CLASSES, 1)
        )

    def forward(self, x):
        x = self.down(x)
        deep = self.deep(x)
        larger = F.interpolate(deep, scale_factor=2, mode="bilinear")
        both = torch.cat([x, self.up(deep) + larger[:, :WIDTH]], 1)
        return self.last(both).mean((2, 3))


class ViT(nn.Module):
    """Dosovitskiy and others, 2020."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 4 * WIDTH, 8, 8)
        self.first = nn.Parameter(torch.zeros(1, 1, 4 * WIDTH))
        self.places = nn.Parameter(torch.zeros(1, 17, 4 * WIDTH))
        how = {"dropout": 0.0, "norm_first": True, "batch_first": True}
        layer = nn.TransformerEncoderLayer(4 * WIDTH, 4, 8 * WIDTH, **how)
        how = {"enable_nested_tensor": False}
        self.body = nn.TransformerEncoder(layer, 2, **how)
        self.head = nn.Linear(4 * WIDTH, CLASSES)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.body(x)[:, 0])


class Volumes(nn.Module):
    """Convolutions in three dimensions, there and back, and along a line."""

    def __init__(self):
        super().__init__()
        self.there = nn.Conv3d(3, WIDTH, 3, 2, 1)
        self.grouped = nn.Conv3d(WIDTH, WIDTH, 3, padding=2, dilation=2, groups=4)
        self.back = nn.ConvTranspose3d(WIDTH, WIDTH, 2, 2, groups=2)
        self.line = nn.Conv1d(WIDTH, CLASSES, 5, stride=3, groups=2)

    def forward(self, x):
        x = x.unflatten(3, (4, -1))  # (N, 3, H, 4, W / 4)
        x = self.back(F.relu(self.grouped(F.relu(self.there(x)))))
        return self.line(x.flatten(2)).mean(2)


NETS = {"resnet": resnet, "convnext": convnext, "efficientnet": efficientnet,
        "unet": UNet, "vit": ViT, "volumes": Volumes}  # fmt: skip

parser = argparse.ArgumentParser()
parser.add_argument("net", choices=NETS)
parser.add_argument("--last", action="store_true", help="channels come last")
parser.add_argument("--half", action="store_true", help="under autocast")
options = parser.parse_args()
dist.init_process_group("nccl")
torch.manual_seed(0)
form = torch.channels_last if options.last else torch.contiguous_format
net = NETS[options.net]().cuda()
if options.net != "volumes":
    net = net.to(memory_format=form)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
for _ in range(2):
    x = torch.randn(4, 3, 32, 32, device="cuda").contiguous(memory_format=form)
    y = torch.zeros(4, dtype=torch.long, device="cuda")
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, options.half):
        loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
assert loss.isfinite()
print(f"ok vision: {options.net}")
dist.destroy_process_group()
