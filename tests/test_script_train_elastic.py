"""`train_elastic.py`: lesson 24's script, run unmodified; and what wraps it."""

import re
from pathlib import Path

import pytest
import torch

from tests import take_home
from tests.launching import load, prose_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def script():
    return load("train_elastic.py")


def losses(text: str) -> dict[int, float]:
    found = re.findall(r"step (\d+): loss (\d\.\d{4})", text)
    return {int(step): float(loss) for step, loss in found}


def printed(ranks: int, folder: Path, more: str = "") -> dict[int, float]:
    words = f"torchrun --standalone --nproc-per-node={ranks} train_elastic.py"
    command = f"python -m simgpu --gpus {ranks} {words}{more}"
    return losses(take_home.run_command(command, folder))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> dict[int, float]:
    return printed(1, tmp_path_factory.mktemp("one"), " --steps 36")


def test_the_lessons_own_command_has_the_losses_of_one_process(one_process, tmp_path):
    found = losses(take_home.run("24", tmp_path))  # two ranks
    assert list(found) == [5, 10, 15, 20, 24]
    for step in (5, 10, 15, 20):
        assert found[step] == pytest.approx(one_process[step], abs=2e-4)
    assert found[24] < 0.7 * found[5]
    again = printed(4, tmp_path, " --folder checkpoints --steps 36")
    assert list(again) == [25, 30, 35, 36]  # four ranks go on where two have ended
    for step in again:
        assert again[step] == pytest.approx(one_process[step], abs=2e-4)


def test_a_killed_rank_is_started_again_by_the_lessons_command(
    one_process, script, tmp_path
):
    """What the first start has left in the store of torchrun must not be read."""
    loop = "    while step < args.steps:\n"
    dies = '        if (step, rank, os.environ["TORCHELASTIC_RESTART_COUNT"]) == '
    dies += '(12, 1, "0"):\n            os.kill(os.getpid(), 9)\n'
    text = Path(script.__file__).read_text()
    assert text.count(loop) == 1
    mortal = tmp_path / "train_elastic.py"
    mortal.write_text(text.replace(loop, loop + dies))
    _, command = take_home.commands(prose_of(take_home.lesson_of("24")))
    command = command.replace("train_elastic.py", str(mortal))
    found = losses(take_home.run_command(command, tmp_path))
    assert list(found) == [5, 10, 15, 20, 24]
    assert found[20] == pytest.approx(one_process[20], abs=2e-4)


def test_steps_of_an_epoch_have_different_samples(script):
    steps = script.SAMPLES // 120
    rows = [script.rows_of_step(step, 120, script.SAMPLES) for step in range(2 * steps)]
    first, second = torch.cat(rows[:steps]), torch.cat(rows[steps:])
    assert len(first.unique()) == len(second.unique()) == script.SAMPLES
    assert not torch.equal(first, second)


def test_checkpoints_are_whole_or_not_there(script, tmp_path: Path):
    assert script.newest(tmp_path) == (None, [])
    for step in (5, 10, 15):
        script.save(tmp_path, step, {"step": step})
    names = ["step-000010.pt", "step-000015.pt"]
    assert [path.name for path in sorted(tmp_path.iterdir())] == names
    assert script.newest(tmp_path) == ({"step": 15}, [])
    whole = (tmp_path / names[1]).read_bytes()
    for wrong in (b"", whole[:40], whole[:-1], whole[:-1] + b"?"):
        (tmp_path / names[1]).write_bytes(wrong)
        assert script.newest(tmp_path) == ({"step": 10}, [names[1]])
