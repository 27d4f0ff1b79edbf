"""The programs for recorded steps are those that were recorded, as far as is known."""

import json
from pathlib import Path

import pytest
import torch

import simgpu
from recorded import models, programs

RECORDINGS = Path(__file__).parent / "recordings"


def estimate(program: programs.Program, card: str) -> simgpu.Estimate:
    return simgpu.estimate(program.function, *program.arguments, card=card)


@pytest.mark.parametrize(
    "make, parameters",  # as Hugging Face and torchvision count them
    [
        (lambda: models.Gpt2(models.GPT2_LARGE), 774_030_080),
        (lambda: models.Opt(models.OPT_13), 1_315_758_080),
        (lambda: models.bert_for_pre_training(models.BERT_LARGE), 336_226_108),
        (models.resnet50, 25_557_032),
    ],
)
def test_a_model_has_as_many_parameters_as_the_recorded_one(make, parameters):
    with torch.device("meta"):
        model = make()
    assert sum(weight.numel() for weight in model.parameters()) == parameters


def test_a_step_of_resnet_has_the_recorded_operations_and_peak():
    program = programs.resnet50_v100()
    found = estimate(program, "V100")
    recorded = json.loads((RECORDINGS / "resnet50_v100.json").read_text("utf-8"))
    kernels = {name: count for name, count, _ in recorded["rows"]}
    renamed = {
        "native_batch_norm": "cudnn_batch_norm",
        "native_batch_norm_backward": "cudnn_batch_norm_backward",
        "relu_": "clamp_min",
    }
    same = ("threshold_backward", "max_pool2d_with_indices", "mean")
    for name in (*renamed, *same, "max_pool2d_with_indices_backward"):
        count = found.by_operation[name].count / 2  # there are two steps
        assert count == kernels[renamed.get(name, name)]
    (peak_rise,) = recorded["peak_rise_bytes"]
    assert program.measured["peak_rise"] == pytest.approx(peak_rise, rel=5e-4)


def test_a_pass_without_gradients_has_no_backward():
    program = programs.steps_fp32("bert_large", "inf", 1, 128)
    found = estimate(program, "H100")
    assert program.measured.keys() == {"forward"}
    assert found.by_operation["addmm"].count == 2 * (24 * 6 + 2)
    assert "native_dropout" not in found.by_operation


def test_gradients_of_a_training_pass_are_added_to_those_that_are_there():
    program = programs.steps_fp32("gpt2_large", "train", 1, 64)
    found = estimate(program, "H100")
    assert program.measured["backward"] > program.measured["forward"]
    model, _ = program.arguments
    assert found.by_operation["add_"].count >= len(list(model.parameters()))


def test_what_computes_in_half_precision_scales_its_loss():
    full = programs.throughput_dle("ResNet-50 train", "tf32", 8)
    half = programs.throughput_dle("ResNet-50 train", "amp fp16", 8)
    assert "_amp_update_scale_" not in estimate(full, "A100").by_operation
    assert estimate(half, "A100").by_operation["_amp_update_scale_"].count == 2
    assert not torch.backends.cuda.matmul.allow_tf32
