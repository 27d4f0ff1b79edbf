"""Trains Flux dev as torchtitan did: FSDP2, checkpoints, and T5 within each step.

    python -m simgpu dry-run --world 8 flux.py --batch 4

Images of 256 pixels are 256 tokens, captions 4,096. T5 XXL in bfloat16 encodes them
with all scores of attention in memory, as Transformers does. The small encoders, of
images and of CLIP, are left out.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WIDTH, HEADS, TEXT, IMAGE = 3072, 24, 4096, 256
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--whole-t5", action="store_true", help="on every rank")
args = parser.parse_args()


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return y.to(x.dtype) * self.weight


class T5Block(nn.Module):
    """One of 24 of T5 XXL: 64 heads of 64, a gated feed-forward of 10,240."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(4096), RMSNorm(4096)
        self.q, self.k, self.v, self.o = (
            nn.Linear(4096, 4096, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(4096, 10240, bias=False) for _ in range(2))
        self.down = nn.Linear(10240, 4096, bias=False)

    def forward(self, x, bias):
        y = self.norm1(x)
        q, k, v = (
            part(y).unflatten(-1, (64, 64)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        scores = torch.matmul(q, k.transpose(3, 2))
        scores += bias
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        y = torch.matmul(weights, v).transpose(1, 2).flatten(2)
        x = x + self.o(y)
        y = self.norm2(x)
        return x + self.down(F.gelu(self.gate(y), approximate="tanh") * self.up(y))


class T5(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(32128, 4096)
        self.distances = nn.Embedding(32, 64)
        self.blocks = nn.ModuleList(T5Block() for _ in range(24))
        self.norm = RMSNorm(4096)

    def forward(self, ids):
        x = self.words(ids)
        near = torch.zeros(TEXT, TEXT, dtype=torch.long, device=ids.device)
        bias = self.distances(near).permute(2, 0, 1).unsqueeze(0)
        bias = bias + torch.zeros(
            len(ids), 1, 1, TEXT, dtype=x.dtype, device=ids.device
        )
        for block in self.blocks:
            x = block(x, bias)
        return self.norm(x)


def attention(q, k, v, turns):
    """Flux rotates in float32, with two-by-two matrices."""

    def rotated(x):
        pairs = x.float().unflatten(-1, (-1, 1, 2))
        out = turns[..., 0] * pairs[..., 0] + turns[..., 1] * pairs[..., 1]
        return out.flatten(-2).type_as(x)

    y = F.scaled_dot_product_attention(rotated(q), rotated(k), v)
    return y.transpose(1, 2).flatten(2)


class Stream(nn.Module):
    """What a double block has for images, and once more for text."""

    def __init__(self):
        super().__init__()
        self.mod = nn.Linear(WIDTH, 6 * WIDTH)
        self.norm1, self.norm2 = (
            nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2)
        )
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList([RMSNorm(128), RMSNorm(128)])
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def begin(self, x, vec):
        mods = self.mod(F.silu(vec))[:, None, :].chunk(6, -1)
        y = (1 + mods[1]) * self.norm1(x) + mods[0]
        q, k, v = self.qkv(y).unflatten(-1, (3, HEADS, 128)).permute(2, 0, 3, 1, 4)
        return (self.norms[0](q), self.norms[1](k), v), mods

    def end(self, x, y, mods):
        x = x + mods[2] * self.out(y)
        return x + mods[5] * self.mlp((1 + mods[4]) * self.norm2(x) + mods[3])


class Double(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = Stream(), Stream()

    def forward(self, image, text, vec, turns):
        of_image, image_mods = self.image.begin(image, vec)
        of_text, text_mods = self.text.begin(text, vec)
        both = (torch.cat(pair, 2) for pair in zip(of_text, of_image, strict=True))
        y = attention(*both, turns)
        image = self.image.end(image, y[:, text.shape[1] :], image_mods)
        return image, self.text.end(text, y[:, : text.shape[1]], text_mods)


class Single(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = nn.Linear(WIDTH, 7 * WIDTH)
        self.out = nn.Linear(5 * WIDTH, WIDTH)
        self.norms = nn.ModuleList([RMSNorm(128), RMSNorm(128)])
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.mod = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x, vec, turns):
        shift, scale, gate = self.mod(F.silu(vec))[:, None, :].chunk(3, -1)
        y = (1 + scale) * self.norm(x) + shift
        qkv, mlp = self.into(y).split([3 * WIDTH, 4 * WIDTH], -1)
        q, k, v = qkv.unflatten(-1, (3, HEADS, 128)).permute(2, 0, 3, 1, 4)
        y = attention(self.norms[0](q), self.norms[1](k), v, turns)
        return x + gate * self.out(torch.cat((y, F.gelu(mlp, approximate="tanh")), 2))


def embedder(fan_in):
    return nn.Sequential(nn.Linear(fan_in, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.linear = nn.Linear(WIDTH, 64)
        self.mod = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))

    def forward(self, x, vec):
        shift, scale = self.mod(vec)[:, None, :].chunk(2, -1)
        return self.linear((1 + scale) * self.norm(x) + shift)


class Flux(nn.Module):
    def __init__(self):
        super().__init__()
        self.image_in, self.text_in = nn.Linear(64, WIDTH), nn.Linear(4096, WIDTH)
        self.time_in, self.guidance_in = embedder(256), embedder(256)
        self.vector_in = embedder(768)
        self.doubles = nn.ModuleList(Double() for _ in range(19))
        self.singles = nn.ModuleList(Single() for _ in range(38))
        self.last = Last()

    def forward(self, image, text, time, guidance, vector, turns):
        image, text = self.image_in(image), self.text_in(text)
        vec = self.time_in(time) + self.guidance_in(guidance) + self.vector_in(vector)
        for block in self.doubles:
            image, text = block(image, text, vec, turns)
        x = torch.cat((text, image), 1)
        for block in self.singles:
            x = block(x, vec, turns)
        return self.last(x[:, text.shape[1] :], vec)


dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.set_default_device("cuda")
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
with torch.device("meta"):
    t5 = T5().bfloat16().requires_grad_(False)
    model = Flux()
if not args.whole_t5:
    for part in [*t5.blocks, t5]:
        fully_shard(part, mp_policy=policy)
for blocks in (model.doubles, model.singles):
    for i, block in enumerate(blocks):
        blocks[i] = checkpoint_wrapper(block, preserve_rng_state=False)
small = [model.image_in, model.time_in, model.guidance_in, model.vector_in]
for part in [*small, model.text_in, *model.doubles, *model.singles, model.last, model]:
    fully_shard(part, mp_policy=policy)
t5.to_empty(device="cuda")
model.to_empty(device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
kind = {"dtype": torch.bfloat16}
for _ in range(3):
    with torch.no_grad():
        text = t5(torch.randint(32128, (args.batch, TEXT)))
    optimizer.zero_grad()
    image = torch.randn(args.batch, IMAGE, 64, **kind)
    noise = torch.randn_like(image)
    time, guidance = (torch.randn(args.batch, 256, **kind) for _ in range(2))
    vector = torch.randn(args.batch, 768, **kind)
    turns = torch.randn(args.batch, 1, TEXT + IMAGE, 64, 2, 2)
    out = model(image, text, time, guidance, vector, turns)
    loss = F.mse_loss(out.float(), (noise - image).float())
    del out, noise
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
