"""Programs that are wrong, each after a public report, and what `prove` must find."""

from helpers.incidents.incident import Incident

_TORCH = "https://github.com/pytorch/pytorch/issues/"
_DDP = "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html"

INCIDENTS = (
    Incident(
        "tokens-averaged-per-rank", "ddp_tokens",
        ((
            "    dist.all_reduce(count)\n"
            "    loss = total / count * world_size  # DDP divides by the world size\n",
            "    loss = total / count\n",
        ),),
        "https://github.com/huggingface/transformers/issues/34242",
        (0, "loss", ""),
    ),
    Incident(
        "norm-of-one-shard", "fsdp_gpt",
        ((
            "    nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n",
            "    shards = [parameter.grad.to_local() for parameter in model.parameters()]\n"
            "    norm = torch.stack([shard.norm() for shard in shards]).norm()\n"
            "    for shard in shards:\n"
            "        shard *= (0.5 / norm).clamp(max=1)\n",
        ),),
        _TORCH + "160285",
        (0, "gradient", "blocks.1.down.bias"),
    ),
    Incident(
        "divided-twice", "ddp_digits",
        (("(loss / len(parts)).backward()", "(loss / len(parts) / world_size).backward()"),),
        "https://discuss.pytorch.org/t/average-loss-in-dp-and-ddp/93306",
        (0, "gradient", ""),
    ),
    Incident(
        "forgotten-set-epoch", "ddp_epochs",
        (("    sampler.set_epoch(epoch)\n", ""),),
        "https://docs.pytorch.org/docs/stable/data.html"
        "#torch.utils.data.distributed.DistributedSampler",
        (None, "epoch", ""),
    ),
    Incident(
        "batchnorm-per-rank", "ddp_images",
        (("model = nn.SyncBatchNorm.convert_sync_batchnorm(model)\n", ""),),
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html",
        (0, "output", "2"),
    ),
    Incident(
        "equal-dropout", "sliced_layers",
        (("torch.manual_seed(1 + rank)", "torch.manual_seed(1)"),),
        "https://docs.pytorch.org/docs/stable/distributed.tensor.html",
        (0, "dropout", "the dropout after …"),
    ),
    Incident(
        "all-on-gpu-0", "ddp_digits",
        (
            ("torch.cuda.set_device(local_rank)", "torch.cuda.set_device(0)"),
            ("device_ids=[local_rank]", "device_ids=[0]"),
        ),
        "https://github.com/pytorch/pytorch/issues/23206",
        (None, "error", "rank …"),
    ),
    Incident(
        "sync-at-the-wrong-part", "ddp_digits",
        ((
            "contextlib.nullcontext() if last else parallel.no_sync()",
            "parallel.no_sync() if last else contextlib.nullcontext()",
        ),),
        "https://discuss.pytorch.org/t/gradient-accumulation-with-ddp-no-sync-interface/169593",
        (0, "gradient", "2.bias"),
    ),
    Incident(
        "checkpoint-of-one-shard", "fsdp_gpt",
        (
            (
                "        saved = state_dict.get_model_state_dict(model, options=save_whole)\n",
                "        saved = [p.to_local().detach().clone() for p in model.parameters()]\n"
                "        for shard in saved:  # what rank 0 has written, all ranks read\n"
                "            dist.broadcast(shard, src=0)\n",
            ),
            (
                "        state_dict.set_model_state_dict(model, saved, options=load_whole)\n",
                "        for parameter, shard in zip(model.parameters(), saved):\n"
                "            parameter.to_local().detach().copy_(shard)\n",
            ),
        ),
        "https://docs.pytorch.org/docs/stable/distributed.checkpoint.html",
        (4, "parameters", "words.weight"),
    ),
    Incident(
        "scheduler-per-part", "ddp_digits",
        (
            ("    scheduler.step()\n", ""),
            (
                "            (loss / len(parts)).backward()\n",
                "            (loss / len(parts)).backward()\n"
                "            scheduler.step()\n",
            ),
        ),
        "https://github.com/huggingface/accelerate/issues/963",
        (0, "settings", "group 0, lr"),
    ),
    Incident(
        "uneven-last-batch", "ddp_epochs",
        (("TensorDataset(inputs[:32], labels[:32])", "TensorDataset(inputs, labels)"),),
        _TORCH + "25162",
        (2, "samples", ""),
    ),
    Incident(
        "buffer-per-rank", "ddp_images",
        (("            dist.all_reduce(size, op=dist.ReduceOp.AVG)\n", ""),),
        _DDP,
        (0, "buffer", "0.size"),
    ),
    Incident(
        "clipped-before-averaging", "averaged_by_hand",
        (
            ("    nn.utils.clip_grad_norm_(model.parameters(), 0.2)\n", ""),
            (
                "    loss.backward()\n",
                "    loss.backward()\n"
                "    nn.utils.clip_grad_norm_(model.parameters(), 0.2)\n",
            ),
        ),
        "https://github.com/Lightning-AI/pytorch-lightning/issues/9675",
        (0, "norm", ""),
    ),
    Incident(
        "tied-weights-cut", "fsdp_gpt",
        (
            ("model = Model().cuda()\n",
             "start = Model().state_dict()\n"
             "with torch.device('meta'):\n"
             "    model = Model()\n"
             "model.load_state_dict(start, assign=True)\n"
             "model.cuda()\n"),
        ),
        "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
        (0, "parameters", "head.weight"),
    ),
    Incident(
        "mask-of-the-first-part", "split_sequence",
        (("torch.arange(part) + rank * part", "torch.arange(part)"),),
        "https://github.com/pytorch/torchtitan/issues/1203",
        (0, "output", "1.out"),
    ),
    Incident(
        "past-ddp", "ddp_tokens",
        (("outputs = parallel(inputs)", "outputs = model(inputs)"),),
        "https://discuss.pytorch.org/t/is-it-required-to-call-ddp-forward/117543",
        (0, "gradient", "2.bias"),
    ),
    Incident(
        "no-sampler", "ddp_epochs",
        (("sampler=sampler)", "shuffle=True)"),),
        _DDP,
        (0, "samples", ""),
    ),
    Incident(
        "added-up", "averaged_by_hand",
        (("        parameter.grad /= world_size\n", ""),),
        _DDP,
        (0, "norm", ""),
    ),
    Incident(
        "seeds-of-their-own", "averaged_by_hand",
        (
            ("model = nn", "torch.manual_seed(rank)\nmodel = nn"),
            (
                "for parameter in model.parameters():\n"
                "    dist.broadcast(parameter.data, src=0)\n",
                "",
            ),
        ),
        _DDP,
        (0, "parameters", "0.weight"),
    ),
    Incident(
        "parts-not-divided", "ddp_digits",
        (("(loss / len(parts)).backward()", "loss.backward()"),),
        "https://huggingface.co/blog/gradient_accumulation",
        (0, "gradient", ""),
    ),
    Incident(
        "optimizer-before-sharding", "fsdp_gpt",
        (
            ("optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)\n", ""),
            (
                "for block in model.blocks:\n    fully_shard",
                "optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)\n"
                "for block in model.blocks:\n    fully_shard",
            ),
        ),
        "https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html",
        (0, "optimizer", "words.weight"),
    ),
    Incident(
        "bias-on-every-rank", "sliced_layers",
        (
            ("linear(self.dropout(hidden), self.down)",
             "linear(self.dropout(hidden), self.down, self.bias)"),
            ("        return out + self.bias\n", "        return out\n"),
        ),
        "https://github.com/NVIDIA/Megatron-LM",
        (0, "output", "1"),
    ),
    Incident(
        "biases-left-out", "averaged_by_hand",
        ((
            "    for parameter in model.parameters():\n        dist.all_reduce",
            "    for parameter in model.parameters():\n"
            "        if parameter.ndim == 1:\n"
            "            continue\n"
            "        dist.all_reduce",
        ),),
        _DDP,
        (0, "gradient", "2.bias"),
    ),
    Incident(
        "loaded-on-gpu-0", "ddp_digits",
        ((
            "optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)\n",
            "if rank == 0:\n"
            "    torch.save(model.state_dict(), 'start.pt')\n"
            "dist.barrier()\n"
            "start = torch.load('start.pt')  # saved on cuda:0, so loaded there\n"
            "model.load_state_dict(start)\n"
            "optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)\n",
        ),),
        "https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html",
        (None, "device", "cuda:0"),
    ),
)  # fmt: skip
