"""Right programs: those of `programs/`, and variants that only look unusual."""

from helpers.incidents.incident import FOLDER, Variant

PROGRAMS = tuple(
    Variant(path.stem, path.stem, ()) for path in sorted(FOLDER.glob("*.py"))
)

VARIANTS = (
    Variant(
        "bfloat16", "ddp_digits",
        ((
            "            outputs = parallel(inputs[part].cuda())\n",
            "            with torch.autocast('cuda', torch.bfloat16):\n"
            "                outputs = parallel(inputs[part].cuda())\n",
        ),),
    ),
    Variant(
        "sharded-optimizer-state", "ddp_digits",
        ((
            "optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)",
            "from torch.distributed.optim import ZeroRedundancyOptimizer\n\n"
            "optimizer = ZeroRedundancyOptimizer(\n"
            "    model.parameters(), torch.optim.AdamW, lr=0.01\n)",
        ),),
    ),
    Variant(
        "attention", "ddp_tokens",  # the gradient of the keys' bias is nothing but noise
        ((
            "model = nn.Sequential(nn.Embedding(WORDS, 32), nn.GELU(), "
            "nn.Linear(32, WORDS)).cuda()",
            "layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)\n"
            "model = nn.Sequential(nn.Embedding(WORDS, 32), layer, nn.Linear(32, WORDS))\n"
            "model.cuda()\ntorch.manual_seed(1 + rank)  # of dropout",
        ),),
    ),
    Variant(
        "losses-divided-by-the-batch", "averaged_by_hand",
        (
            (
                "mse_loss(model(inputs[mine].cuda()), targets[mine].cuda())",
                "mse_loss(\n        model(inputs[mine].cuda()), targets[mine].cuda(), "
                "reduction='sum'\n    ) / (4 * BATCH)",
            ),
            ("        parameter.grad /= world_size\n", ""),
        ),
    ),
    Variant(
        "left-over-samples-dropped", "ddp_epochs",
        (
            ("TensorDataset(inputs[:32], labels[:32])", "TensorDataset(inputs, labels)"),
            ("DistributedSampler(data, shuffle=True)",
             "DistributedSampler(data, shuffle=True, drop_last=True)"),
            ("sampler=sampler)", "sampler=sampler, drop_last=True)"),
        ),
    ),
    Variant(
        "buffers-broadcast", "ddp_images",
        ((", broadcast_buffers=False)", ")"),),
    ),
    Variant(
        "mixed-precision-sharded", "fsdp_gpt",
        (
            (
                "import fully_shard\n",
                "import MixedPrecisionPolicy, fully_shard\n",
            ),
            (
                "for block in model.blocks:\n    fully_shard(block)\nfully_shard(model)",
                "policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)\n"
                "for block in model.blocks:\n    fully_shard(block, mp_policy=policy)\n"
                "fully_shard(model, mp_policy=policy)",
            ),
            ("model(inputs).flatten(0, 1)", "model(inputs).float().flatten(0, 1)"),
        ),
    ),
    Variant(
        "recomputed", "fsdp_gpt",
        ((
            "            x = block(x)\n",
            "            x = torch.utils.checkpoint.checkpoint("
            "block, x, use_reentrant=False)\n",
        ),),
    ),
    Variant(
        "zigzag-sequence", "split_sequence",
        (
            (
                "        part = LENGTH // world_size\n"
                "        mine = torch.arange(part) + rank * part  # positions of my queries\n",
                "        mine = torch.arange(LENGTH)[rank::world_size]\n"
                "        order = torch.cat([torch.arange(LENGTH)[r::world_size] "
                "for r in range(world_size)])\n",
            ),
            ("mine[:, None] >= torch.arange(LENGTH))", "mine[:, None] >= order)"),
            ("inputs.chunk(world_size, dim=1)[rank].cuda()",
             "inputs[:, rank::world_size].cuda()"),
            ("targets.chunk(world_size, dim=1)[rank].cuda()",
             "targets[:, rank::world_size].cuda()"),
        ),
    ),
)  # fmt: skip
