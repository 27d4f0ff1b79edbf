"""`score_workers.py` and the other scripts of lesson 14."""

import re
import subprocess
import sys

import pytest
import torch

from tests import take_home
from tests.launching import SCRIPTS, prose_of, shown, text_of

pytestmark = pytest.mark.slow

LESSON = "14-share-tensors-between-processes.ipynb"


@pytest.fixture(scope="module")
def by_gpus(tmp_path_factory):
    """What is printed, and the scores, with one and with four GPUs."""
    found = {}
    for gpus in (1, 4):
        folder = tmp_path_factory.mktemp("score_workers")
        if gpus == 4:
            printed = take_home.run("14", folder)
        else:
            command = f"python -m simgpu --gpus {gpus} score_workers.py"
            printed = take_home.run_command(command, folder)
        found[gpus] = printed, torch.load(folder / "scores.pt")
    return found


def test_several_processes_score_as_one_does(by_gpus):
    (alone, one), (printed, several) = by_gpus[1], by_gpus[4]
    torch.testing.assert_close(several, one, rtol=0, atol=1e-5)
    loss = r"20,000 images, loss (\d\.\d{4}), saved"
    assert re.search(loss, printed)[1] == re.search(loss, alone)[1]
    for rank in range(4):
        assert f"cuda:{rank}: 5,000 images, peak " in printed


def test_a_dead_worker_is_named(tmp_path):
    text = text_of("score_workers.py")
    line = "    torch.cuda.set_device(rank)\n"
    assert line in text
    script = tmp_path / "dies.py"
    script.write_text(text.replace(line, f"    assert rank != 1, 'bad card'\n{line}"))
    done = subprocess.run(
        [sys.executable, "-m", "simgpu", "--gpus", "2", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=take_home.SECONDS,
    )
    assert done.returncode == 1
    assert "worker 1 on cuda:1 died: exit code 1" in done.stderr
    assert "AssertionError: bad card" in done.stderr


@pytest.mark.parametrize(
    "way, told", [("mp.spawn", "ProcessExitedException"), ("torchrun", "exit code 1")]
)
def test_after_a_kill_the_other_worker_is_ended(tmp_path, way, told):
    done = subprocess.run(
        [sys.executable, SCRIPTS / "launch_ways.py", way, "killed"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=take_home.SECONDS,
    )
    assert done.stdout.strip() == told, done.stderr
    assert not (tmp_path / "finished").exists()


def test_the_lesson_shows_the_scripts_as_they_are():
    prose = prose_of(LESSON)
    ways, hogwild = text_of("launch_ways.py"), text_of("hogwild.py")
    assert shown(prose, text_of("share_one.py").partition('"""\n\n')[2])
    assert shown(prose, ways[ways.index("def by_process") : ways.index("WAYS =")])
    loop = hogwild[hogwild.index("def train(") : hogwild.index("def work(")]
    assert shown(prose, loop)
    count = text_of("share_count.py")
    loop = count[count.index("    for elements") : count.index("    worker.join")]
    assert loop.strip("\n") in prose


def test_each_script_is_there_that_the_lesson_links_to():
    for name in re.findall(r"\(scripts/(\w+\.py)\)", prose_of(LESSON)):
        assert (SCRIPTS / name).is_file()
