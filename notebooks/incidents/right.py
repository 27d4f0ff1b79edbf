"""Right programs: those of `programs/`, and variants that only look unusual."""

from incidents.incident import FOLDER, Variant

PROGRAMS = tuple(
    Variant(path.stem, path.stem, "") for path in sorted(FOLDER.glob("*.py"))
)

VARIANTS = (
    Variant(
        "bfloat16",
        "ddp_digits",
        """\
-            outputs = parallel(inputs[part].cuda())
+            with torch.autocast('cuda', torch.bfloat16):
+                outputs = parallel(inputs[part].cuda())
""",
    ),
    Variant(
        "sharded-optimizer-state",
        "ddp_digits",
        """\
-optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
+from torch.distributed.optim import ZeroRedundancyOptimizer
+
+optimizer = ZeroRedundancyOptimizer(
+    model.parameters(), torch.optim.AdamW, lr=0.01
+)
""",
    ),
    Variant(
        "attention",
        "ddp_tokens",
        """\
-model = nn.Sequential(nn.Embedding(WORDS, 32), nn.GELU(), nn.Linear(32, WORDS)).cuda()
+layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
+model = nn.Sequential(nn.Embedding(WORDS, 32), layer, nn.Linear(32, WORDS))
+model.cuda()
+torch.manual_seed(1 + rank)  # of dropout
""",
    ),
    Variant(
        "losses-divided-by-the-batch",
        "averaged_by_hand",
        """\
-    loss = mse_loss(model(inputs[mine].cuda()), targets[mine].cuda())
+    loss = mse_loss(
+        model(inputs[mine].cuda()), targets[mine].cuda(), reduction='sum'
+    ) / (4 * BATCH)

-        parameter.grad /= world_size
""",
    ),
    Variant(
        "left-over-samples-dropped",
        "ddp_epochs",
        """\
-data = TensorDataset(inputs[:32], labels[:32])
-sampler = DistributedSampler(data, shuffle=True)
-loader = DataLoader(data, batch_size=BATCH // world_size, sampler=sampler)
+data = TensorDataset(inputs, labels)
+sampler = DistributedSampler(data, shuffle=True, drop_last=True)
+each = BATCH // world_size
+loader = DataLoader(data, batch_size=each, sampler=sampler, drop_last=True)
""",
    ),
    Variant(
        "buffers-broadcast",
        "ddp_images",
        """\
-parallel = DDP(model, device_ids=[local_rank], broadcast_buffers=False)
+parallel = DDP(model, device_ids=[local_rank])
""",
    ),
    Variant(
        "mixed-precision-sharded",
        "fsdp_gpt",
        """\
-from torch.distributed.fsdp import fully_shard
+from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

 model = Model().cuda()
+policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

-    fully_shard(block)
-fully_shard(model)
+    fully_shard(block, mp_policy=policy)
+fully_shard(model, mp_policy=policy)

-    loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
+    loss = cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())
""",
    ),
    Variant(
        "recomputed",
        "fsdp_gpt",
        """\
-            x = block(x)
+            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
""",
    ),
    Variant(
        "zigzag-sequence",
        "split_sequence",
        """\
-        part = LENGTH // world_size
-        mine = torch.arange(part) + rank * part  # positions of my queries
-        self.register_buffer("mask", mine[:, None] >= torch.arange(LENGTH))
+        mine = torch.arange(LENGTH)[rank::world_size]
+        parts = [torch.arange(LENGTH)[r::world_size] for r in range(world_size)]
+        order = torch.cat(parts)
+        self.register_buffer("mask", mine[:, None] >= order)

-    inputs = inputs.chunk(world_size, dim=1)[rank].cuda()
-    targets = targets.chunk(world_size, dim=1)[rank].cuda()
+    inputs = inputs[:, rank::world_size].cuda()
+    targets = targets[:, rank::world_size].cuda()
""",
    ),
)
