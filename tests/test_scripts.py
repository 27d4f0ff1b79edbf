"""Scripts that readers launch with torchrun: `ddp_digits.py`."""

import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from support.limits import JOB
from tests.launching import (
    SCRIPTS,
    in_ranks,
    last_calls,
    load,
    text_of,
)

SCRIPT = "ddp_digits.py"


@pytest.fixture(scope="module")
def script():
    return load(SCRIPT)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What 1, 2 and 4 ranks print, and the weights that they saved."""
    folder, found = tmp_path_factory.mktemp("weights"), {}
    for ranks in (1, 2, 4):
        file = folder / f"{ranks}.pt"
        printed = in_ranks(SCRIPT, ranks, "--epochs=2", "--save", str(file))
        found[ranks] = (printed, torch.load(file))
    return found


@pytest.mark.slow
def test_only_rank_0_prints_and_the_number_of_ranks_does_not_matter(saved):
    lines = {ranks: out.splitlines() for ranks, (out, _) in saved.items()}
    assert all(len(each) == 1 for each in lines.values()), lines
    said = {re.sub(r"^\[0\] \d ranks", "", out) for (out,) in lines.values()}
    assert len(said) == 1
    assert re.fullmatch(r": accuracy \d\d\.\d\d%, 1,204,264 bytes a step", said.pop())


def test_all_save_the_weights_of_one_process(saved):
    _, reference = saved[1]
    for ranks in (2, 4):
        _, weights = saved[ranks]
        assert list(weights) == list(reference)
        for name in reference:
            torch.testing.assert_close(
                weights[name], reference[name], atol=1e-4, rtol=0
            )


def test_saved_weights_fit_the_bare_model(saved, script):
    script.make_model().load_state_dict(saved[2][1])


def test_wrong_arguments_are_refused_before_anything_starts(script, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit, match="2"):
        script.main(["--batch=128"])
    with pytest.raises(SystemExit, match="2"):
        script.main(["--compress=zip"])
    assert not dist.is_initialized()


# Groups, until the process ends. A hook of DDP runs in gloo's thread and holds its
# group: were it the last to do so, the thread would join itself, which aborts
KEPT = []


@pytest.fixture
def one_rank(tmp_path, monkeypatch):
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1)):
        monkeypatch.setenv(name, str(value))
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    KEPT.append(dist.group.WORLD)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "compress, numbers, width",
    [("none", 301_066, 4), ("fp16", 301_066, 2), ("powersgd", 5278, 4)],
)
def test_bytes_of_a_step(script, one_rank, compress, numbers, width, monkeypatch):
    """Also against what is handed to `dist.all_reduce`, where Python calls it."""
    from helpers import digits

    model = script.train(digits(), epochs=1, compress=compress)
    handed, all_reduce = [], dist.all_reduce

    def noted(tensor, *args, **kwargs):
        handed.append(tensor.nbytes)
        return all_reduce(tensor, *args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", noted)
    assert script.bytes_of_a_step(model) == numbers * width
    if compress != "none":  # without a hook C++ sends
        assert sum(handed) == numbers * width


def test_the_end_of_a_script_leaves_at_once():
    """`destroy_process_group` in main, then a flush and `os._exit(0)`; why is said."""
    assert last_calls(SCRIPT) == ["main()", "sys.stdout.flush()", "os._exit(0)"]
    assert "aborts" in text_of(SCRIPT).partition("__main__")[2]
    assert "dist.destroy_process_group()" in text_of(SCRIPT)


def test_failures_end_with_a_status():
    done = subprocess.run(
        [sys.executable, SCRIPTS / SCRIPT, "--batch=7"],
        env={**os.environ, "WORLD_SIZE": "2"},  # as torchrun tells each rank
        capture_output=True,
        text=True,
        timeout=JOB,
    )
    assert done.returncode == 2
    assert "--batch 7 cannot be split over 2 ranks" in done.stderr
