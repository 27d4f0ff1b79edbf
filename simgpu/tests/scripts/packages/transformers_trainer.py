"""transformers' Trainer: a small GPT-2 on the ranks of torchrun, with metrics.

torchrun --nproc-per-node=2 -m simgpu transformers_trainer.py --fp16
"""

import sys

import torch
from accelerate.utils import gather_object
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

WORDS, LENGTH, SAMPLES, BATCH = 32, 8, 32, 8


def texts() -> list[dict]:
    """Samples that a model can learn: each counts on from its first word."""
    starts = torch.arange(SAMPLES)[:, None]
    words = (starts + torch.arange(LENGTH)) % WORDS
    return [{"input_ids": row, "labels": row} for row in words]


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 32, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(n_layer=2, **sizes, **no_dropout))


def accuracy(prediction) -> dict[str, float]:
    right = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"accuracy": float(right.mean()), "samples": len(right)}


def trainer(flags: dict, batch: int) -> Trainer:
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=batch, per_device_eval_batch_size=batch,
        max_steps=8, learning_rate=1e-2, lr_scheduler_type="constant",
        report_to=[], save_strategy="no", logging_steps=4, disable_tqdm=True,
        train_sampling_strategy="sequential", **flags,
    )  # fmt: skip
    return Trainer(
        model(), arguments, train_dataset=texts(), eval_dataset=texts(),
        compute_metrics=accuracy,
    )  # fmt: skip


@torch.no_grad()
def loss_of(model: GPT2LMHeadModel) -> float:
    words = torch.stack([sample["input_ids"] for sample in texts()])
    return float(model.eval()(words, labels=words).loss)


def main() -> None:
    flags = {flag.removeprefix("--"): True for flag in sys.argv[1:]}
    learner = trainer(flags, BATCH // 2)
    learner.train()
    metrics = learner.evaluate()
    assert learner.args.world_size == 2 and learner.args.device.type == "cuda"
    assert metrics["eval_samples"] == SAMPLES, metrics
    alone = model()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2, weight_decay=0.0)
    samples = texts()
    for step in range(8):
        start = step * BATCH % SAMPLES
        words = torch.stack([s["input_ids"] for s in samples[start : start + BATCH]])
        optimizer.zero_grad()
        alone(words, labels=words).loss.backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        optimizer.step()
    found = learner.model.cpu().float()
    if flags:  # the scaler skips steps, and Adam makes much of a small difference
        assert loss_of(found) < loss_of(model())
        totals = [sum(float(p.sum()) for p in found.parameters())]
        assert len(set(gather_object(totals))) == 1, totals
    else:
        for name, weight in alone.state_dict().items():
            its = found.state_dict()[name]
            torch.testing.assert_close(its, weight, rtol=1e-4, atol=1e-4)
    if learner.is_world_process_zero():
        print("ok", metrics["eval_accuracy"], flush=True)


main()
