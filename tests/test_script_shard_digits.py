"""`shard_digits.py`: saved by 4 ranks, loaded by 2 and by 1."""

import pytest
import torch.distributed as dist

from tests.launching import in_ranks, load, prose_of, shown, text_of

SHARD = "shard_digits.py"


@pytest.fixture(scope="module")
def saved_by_four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    printed = in_ranks(SHARD, 4, "--steps=10", f"--save={folder}")
    assert printed == "[0] 4 ranks, steps 0 to 10: 85.56% right\n"
    return folder


def test_every_rank_writes(saved_by_four):
    names = {file.name for file in saved_by_four.iterdir()}
    assert names == {".metadata", *(f"__{rank}_0.distcp" for rank in range(4))}


@pytest.mark.parametrize("ranks", [1, 2])
def test_fewer_ranks_go_on(saved_by_four, ranks):
    printed = in_ranks(SHARD, ranks, "--steps=10", f"--load={saved_by_four}")
    assert printed == f"[0] {ranks} ranks, steps 10 to 20: 91.94% right\n"


def test_shard_refuses_wrong_arguments(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit, match="2"):
        load(SHARD).main(["--batch=128"])
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "first, behind", [("def shard(", "def rows_of"), ("def save(", "@torch.no_grad()")]
)
def test_lesson_18_shows_the_functions_as_they_are(first, behind):
    function = first + text_of(SHARD).partition(first)[2].partition(behind)[0]
    assert shown(prose_of("18-shard-everything.ipynb"), function)
