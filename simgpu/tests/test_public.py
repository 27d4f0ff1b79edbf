"""Programs in the shape of well-known public ones, run as their readme would say."""

from pathlib import Path

import pytest

from support import programs

SCRIPTS = Path(__file__).parent / "scripts" / "public"


def printed(done: programs.Done) -> str:
    assert done.status == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_a_classifier_trains_alike_by_one_gpu_data_parallel_and_ddp(tmp_path):
    script = SCRIPTS / "images.py"
    ways = [
        programs.simulated(tmp_path, "--gpus", 2, script, "--gpu", 1),
        programs.simulated(tmp_path, "--gpus", 2, script),
        programs.simulated(tmp_path, "--gpus", 2, script, "--spawn"),
        programs.in_ranks(tmp_path, 2, script, "--ddp"),
    ]
    texts = {printed(done) for done in ways}
    assert len(texts) == 1 and texts.pop().startswith("loss 2.2962 top5"), ways


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_gpt_trains_alike_on_one_gpu_and_on_two_ranks(tmp_path, dtype):
    command = ("--no-compile", SCRIPTS / "gpt.py", dtype)
    one = programs.simulated(tmp_path, "--gpus", 1, *command)
    two = programs.in_ranks(tmp_path, 2, *command)
    losses = [line.split()[-1] for line in printed(one).splitlines()]
    assert len(losses) == 4
    pairs = zip(losses, printed(two).splitlines(), strict=True)
    tolerance = 0.0011 if dtype == "float32" else 0.02
    for loss, line in pairs:
        assert abs(float(loss) - float(line.split()[-1])) <= tolerance, (one, two)
