"""Programs that are wrong, each after a public report, and what `prove` must find."""

from incidents.incident import Incident

INCIDENTS = (
    Incident(
        "tokens-averaged-per-rank",
        "ddp_tokens",
        """\
-    dist.all_reduce(count)
-    loss = total / count * world_size  # DDP divides by the world size
+    loss = total / count
""",
        "https://github.com/huggingface/transformers/issues/34242",
        (0, "loss", ""),
    ),
    Incident(
        "norm-of-one-shard",
        "fsdp_gpt",
        """\
-    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
+    shards = [parameter.grad.to_local() for parameter in model.parameters()]
+    norm = torch.stack([shard.norm() for shard in shards]).norm()
+    for shard in shards:
+        shard *= (0.5 / norm).clamp(max=1)
""",
        "https://github.com/pytorch/pytorch/issues/160285",
        (0, "gradient", "blocks.1.down.bias"),
    ),
    Incident(
        "divided-twice",
        "ddp_digits",
        """\
-            (loss / len(parts)).backward()
+            (loss / len(parts) / world_size).backward()
""",
        "https://github.com/NVIDIA/apex/issues/696",
        (0, "gradient", ""),
    ),
    Incident(
        "forgotten-set-epoch",
        "ddp_epochs",
        """\
-    sampler.set_epoch(epoch)
""",
        "https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler",
        (None, "epoch", ""),
    ),
    Incident(
        "batchnorm-per-rank",
        "ddp_images",
        """\
-model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
""",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html",
        (0, "output", "2"),
    ),
    Incident(
        "equal-dropout",
        "sliced_layers",
        """\
-torch.manual_seed(1 + rank)  # of dropout: ranks have different slices
+torch.manual_seed(1)
""",
        "https://github.com/ecmwf/anemoi-core/issues/595",
        (0, "dropout", "the dropout after …"),
    ),
    Incident(
        "all-on-gpu-0",
        "ddp_digits",
        """\
-torch.cuda.set_device(local_rank)
+torch.cuda.set_device(0)

-parallel = DDP(model, device_ids=[local_rank])
+parallel = DDP(model, device_ids=[0])
""",
        "https://github.com/NVIDIA/apex/issues/222",
        (None, "error", "rank …"),
    ),
    Incident(
        "sync-at-the-wrong-part",
        "ddp_digits",
        """\
-        with contextlib.nullcontext() if last else parallel.no_sync():
+        with parallel.no_sync() if last else contextlib.nullcontext():
""",
        "https://github.com/modelscope/FunASR/pull/3472",
        (0, "gradient", "2.bias"),
    ),
    Incident(
        "checkpoint-of-one-shard",
        "fsdp_gpt",
        """\
-        saved = state_dict.get_model_state_dict(model, options=save_whole)
+        saved = [p.to_local().detach().clone() for p in model.parameters()]
+        for shard in saved:  # what rank 0 has written, all ranks read
+            dist.broadcast(shard, src=0)

-        state_dict.set_model_state_dict(model, saved, options=load_whole)
+        for parameter, shard in zip(model.parameters(), saved):
+            parameter.to_local().detach().copy_(shard)
""",
        "https://docs.pytorch.org/docs/stable/distributed.checkpoint.html",
        (4, "parameters", "words.weight"),
    ),
    Incident(
        "scheduler-per-part",
        "ddp_digits",
        """\
             (loss / len(parts)).backward()
+            scheduler.step()

-    scheduler.step()
""",
        "https://github.com/huggingface/accelerate/issues/963",
        (0, "settings", "group 0, lr"),
    ),
    Incident(
        "uneven-last-batch",
        "ddp_epochs",
        """\
-data = TensorDataset(inputs[:32], labels[:32])
+data = TensorDataset(inputs, labels)
""",
        "https://github.com/pytorch/pytorch/issues/25162",
        (2, "samples", ""),
    ),
    Incident(
        "buffer-per-rank",
        "ddp_images",
        """\
-            dist.all_reduce(size, op=dist.ReduceOp.AVG)
""",
        "https://github.com/pytorch/pytorch/issues/63916",
        (0, "buffer", "0.size"),
    ),
    Incident(
        "clipped-before-averaging",
        "averaged_by_hand",
        """\
     loss.backward()
+    nn.utils.clip_grad_norm_(model.parameters(), 0.2)

-    nn.utils.clip_grad_norm_(model.parameters(), 0.2)
""",
        "https://github.com/determined-ai/determined/pull/602",
        (0, "norm", ""),
    ),
    Incident(
        "tied-weights-cut",
        "fsdp_gpt",
        """\
-model = Model().cuda()
+start = Model().state_dict()
+with torch.device('meta'):
+    model = Model()
+model.load_state_dict(start, assign=True)
+model.cuda()
""",
        "https://github.com/huggingface/accelerate/pull/1204",
        (0, "parameters", "head.weight"),
    ),
    Incident(
        "mask-of-the-first-part",
        "split_sequence",
        """\
-        mine = torch.arange(part) + rank * part  # positions of my queries
+        mine = torch.arange(part)  # positions of my queries
""",
        "https://github.com/huggingface/diffusers/issues/13696",
        (0, "output", "1.out"),
    ),
    Incident(
        "past-ddp",
        "ddp_tokens",
        """\
-    outputs = parallel(inputs).flatten(0, 1)
+    outputs = model(inputs).flatten(0, 1)
""",
        "https://github.com/intel/e2eAIOK/issues/197",
        (0, "gradient", "2.bias"),
    ),
    Incident(
        "no-sampler",
        "ddp_epochs",
        """\
-loader = DataLoader(data, batch_size=BATCH // world_size, sampler=sampler)
+loader = DataLoader(data, batch_size=BATCH // world_size, shuffle=True)
""",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html",
        (0, "samples", ""),
    ),
    Incident(
        "added-up",
        "averaged_by_hand",
        """\
-        parameter.grad /= world_size
""",
        "https://github.com/neuralmagic/sparseml/pull/135",
        (0, "norm", ""),
    ),
    Incident(
        "seeds-of-their-own",
        "averaged_by_hand",
        """\
 inputs, targets = torch.randn(96, 16), torch.randn(96, 4)
+torch.manual_seed(rank)

-for parameter in model.parameters():
-    dist.broadcast(parameter.data, src=0)
""",
        "https://github.com/Lightning-AI/pytorch-lightning/issues/6013",
        (0, "parameters", "0.weight"),
    ),
    Incident(
        "parts-not-divided",
        "ddp_digits",
        """\
-            (loss / len(parts)).backward()
+            loss.backward()
""",
        "https://github.com/NVIDIA-NeMo/Automodel/issues/3846",
        (0, "gradient", ""),
    ),
    Incident(
        "optimizer-before-sharding",
        "fsdp_gpt",
        """\
 model = Model().cuda()
+optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

-optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
""",
        "https://github.com/huggingface/accelerate/pull/3394",
        (0, "optimizer", "words.weight"),
    ),
    Incident(
        "bias-on-every-rank",
        "sliced_layers",
        """\
-        out = Sum.apply(linear(self.dropout(hidden), self.down))
-        return out + self.bias
+        out = Sum.apply(linear(self.dropout(hidden), self.down, self.bias))
+        return out
""",
        "https://github.com/huggingface/text-generation-inference/issues/1036",
        (0, "output", "1"),
    ),
    Incident(
        "biases-left-out",
        "averaged_by_hand",
        """\
     for parameter in model.parameters():
+        if parameter.ndim == 1:
+            continue
""",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html",
        (0, "gradient", "2.bias"),
    ),
    Incident(
        "loaded-on-gpu-0",
        "ddp_digits",
        """\
 parallel = DDP(model, device_ids=[local_rank])
+if rank == 0:
+    torch.save(model.state_dict(), 'start.pt')
+dist.barrier()
+start = torch.load('start.pt')  # saved on cuda:0, so loaded there
+model.load_state_dict(start)
""",
        "https://github.com/pytorch/pytorch/issues/23138",
        (None, "device", "cuda:0"),
    ),
)
