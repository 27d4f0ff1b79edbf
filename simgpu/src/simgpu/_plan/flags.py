"""What a trainer is told for a layout: torchtitan's words, and Megatron-LM's."""

from simgpu._plan.layout import Layout


def torchtitan(of: Layout, tokens: int, sequence: int) -> list[str]:
    """Options of torchtitan's command line; none for what it cannot do.

    Args:
        of: the layout.
        tokens: of a step of the whole job.
        sequence: tokens of a sequence.
    """
    if of.zero == 1 and of.stages == 1:
        return []
    made = [
        f"--parallelism.data_parallel_replicate_degree={of.replicas}",
        f"--parallelism.data_parallel_shard_degree={of.shards // of.context}",
        f"--parallelism.tensor_parallel_degree={of.slices}",
        f"--parallelism.pipeline_parallel_degree={of.stages}",
        *([f"--parallelism.context_parallel_degree={of.context}"] * (of.context > 1)),
        *([f"--parallelism.expert_parallel_degree={of.spread}"] * (of.spread > 1)),
        f"--training.seq_len={sequence}",
        f"--training.global_batch_size={tokens // sequence}",
        f"--activation_checkpoint.mode={of.recompute}",
        f"--parallelism.fsdp_reshard_after_forward="
        f"{'always' if of.zero == 3 else 'never'}",
    ]
    if of.recompute == "selective":
        made.append("--activation_checkpoint.selective_ac_option=op")
    if of.stages == 1:
        return [*made, f"--training.local_batch_size={of.micro}"]
    schedule = "1F1B" if of.chunks == 1 else "Interleaved1F1B"
    return [
        *made, f"--training.local_batch_size={of.micro * of.accumulate}",
        f"--parallelism.pipeline_parallel_schedule={schedule}",
        f"--parallelism.pipeline_parallel_microbatch_size={of.micro}",
    ]  # fmt: skip


def megatron(of: Layout, tokens: int, sequence: int, tied: bool) -> list[str]:
    """Options of Megatron-LM's command line, whose FSDP and recomputing are its own.

    Args:
        of: the layout.
        tokens: of a step of the whole job.
        sequence: tokens of a sequence.
        tied: whether the head has the embedding's weights.
    """
    made = [
        f"--tensor-model-parallel-size {of.slices}",
        f"--pipeline-model-parallel-size {of.stages}",
        f"--micro-batch-size {of.micro}",
        f"--global-batch-size {tokens // sequence}",
        f"--seq-length {sequence}",
        "--bf16",
    ]
    if not tied:
        made.append("--untie-embeddings-and-output-weights")
    if of.slices > 1:
        made.append("--sequence-parallel")
    if of.context > 1:
        made.append(f"--context-parallel-size {of.context} --cp-comm-type all_gather")
    if of.spread > 1:
        made.append(f"--expert-model-parallel-size {of.spread} "
                    "--expert-tensor-parallel-size 1")  # fmt: skip
    if of.stages > 1:
        made.append("--account-for-embedding-in-pipeline-split "
                    "--account-for-loss-in-pipeline-split")  # fmt: skip
    if of.chunks > 1:
        made.append(f"--num-virtual-stages-per-pipeline-rank {of.chunks}")
    if of.recompute == "full":
        made.append("--recompute-granularity full --recompute-method uniform "
                    "--recompute-num-layers 1")  # fmt: skip
    elif of.recompute == "selective":
        made.append("--recompute-granularity selective")
    return made + _sharding(of, tied)


def _sharding(of: Layout, tied: bool) -> list[str]:
    """Of these, the ones for parameters, gradients and states."""
    copies = []
    if of.replicas > 1:
        copies = [f"--num-distributed-optimizer-instances {of.replicas}"]
    if of.zero == 1:
        alone = of.slices == of.context == 1
        before = [] if alone else ["(with CUDA_DEVICE_MAX_CONNECTIONS=1)"]
        return ["--use-distributed-optimizer", *copies, *before]
    more = "--no-gradient-accumulation-fusion"
    if of.zero == 3 and not tied and of.spread == of.replicas == 1:
        return [f"--use-torch-fsdp2 {more} --ckpt-format torch_dist"]
    what = "optim_grads_params" if of.zero == 3 else "optim_grads"
    if copies:
        copies.append("--outer-dp-sharding-strategy no_shard")
    return [
        f"--use-megatron-fsdp --data-parallel-sharding-strategy {what} {more} "
        "--ckpt-format fsdp_dtensor --use-distributed-optimizer", *copies,
    ]  # fmt: skip
