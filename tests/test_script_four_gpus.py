"""`one_gpu.py` and `four_gpus.py`: lesson 03's scripts, run unmodified."""

import difflib
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from tests import take_home
from tests.launching import prose_of, shown, text_of

pytestmark = pytest.mark.slow

LESSON = "03-train-on-four-gpus.ipynb"


def torchrun(folder: Path, ranks: int) -> str:
    """What `four_gpus.py` prints in so many ranks."""
    if ranks == 4:
        return take_home.run("03", folder)  # the lesson's own command
    words = f"torchrun --standalone --nproc-per-node={ranks} four_gpus.py"
    return take_home.run_command(f"python -m simgpu --gpus 4 {words}", folder)


def code_of(name: str) -> list[str]:
    return text_of(name).partition('"""\n\n')[2].splitlines()


@pytest.fixture(scope="module")
def printed_and_saved(tmp_path_factory):
    """By the number of ranks: what they print, and the weights that rank 0 saves."""
    found = {}
    for ranks in (1, 4):
        folder = tmp_path_factory.mktemp("four_gpus")
        printed = torchrun(folder, ranks)
        found[ranks] = printed, torch.load(folder / "model.pt", map_location="cpu")
    return found


def test_every_rank_prints_each_epoch(printed_and_saved):
    printed, _ = printed_and_saved[4]
    said = re.findall(r"rank (\d), epoch (\d): loss \d\.\d{4}", printed)
    assert sorted(said) == [(str(r), str(e)) for r in range(4) for e in range(3)]


def test_four_ranks_reach_the_weights_of_one(printed_and_saved):
    (_, one), (_, four) = printed_and_saved[1], printed_and_saved[4]
    assert list(one) == list(four)
    for name in one:
        torch.testing.assert_close(four[name], one[name], rtol=0, atol=1e-5)


def test_the_saved_file_fits_the_bare_model(printed_and_saved):
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    model.load_state_dict(printed_and_saved[4][1])


def test_one_gpu_trains_and_saves(tmp_path: Path):
    losses = re.findall(
        r"loss ([\d.]+)",
        take_home.run_command("python -m simgpu --gpus 1 one_gpu.py", tmp_path),
    )
    assert len(losses) == 3 and losses == sorted(losses, reverse=True)
    assert (tmp_path / "model.pt").is_file()


def test_eleven_lines_and_four_imports_make_the_difference():
    lines = difflib.ndiff(code_of("one_gpu.py"), code_of("four_gpus.py"))
    new = [line[2:] for line in lines if line[:2] == "+ " and line[2:]]
    imports = [line for line in new if re.match("import |from ", line)]
    assert (len(imports), len(new) - len(imports)) == (4, 11)


def test_the_lesson_shows_the_script_as_it_is():
    assert shown(prose_of(LESSON), "\n".join(code_of("one_gpu.py")))
