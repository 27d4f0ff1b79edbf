"""`split_gpt.py`: three ways to split a model."""

import re

import pytest
import torch.distributed as dist

from tests.launching import in_ranks, load, prose_of, shown, text_of

SPLIT = "split_gpt.py"


@pytest.mark.parametrize(
    "ranks, arguments",
    [
        (1, ("--way=pipeline",)),
        (2, ("--way=slices",)),
        (4, ("--way=pipeline", "--schedule=gpipe")),
        (2, ("--way=tokens",)),
    ],
)
def test_each_way_of_splitting_has_the_loss_of_one_process(ranks, arguments):
    printed = in_ranks(SPLIT, ranks, *arguments)
    assert printed == f"[0] {ranks} ranks: loss 4.3525, after 12 steps 3.4029\n"


def test_a_split_that_does_not_come_out_even_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit, match="2"):
        load(SPLIT).main([])
    assert "cannot be split in 3" in capsys.readouterr().err
    assert not dist.is_initialized()


def test_lesson_20_shows_the_code_as_it_is():
    text, prose = text_of(SPLIT), prose_of("20-pipeline-the-layers.ipynb")
    ring = text[text.index("def ring_attend(") : text.index("def split_tokens(")]
    assert shown(prose, ring)
    head = r"def forward\(self, x\):  # \(batch, tokens, width\)\n"
    forward = re.search(head + r"(.*?)\n\n", text, re.DOTALL)[1]
    lines = [line.strip() for line in forward.splitlines()]
    block = prose[prose.index("h = self.norm1(x)") :].partition("```")[0]
    assert [
        line.strip().partition("  # x")[0] for line in block.strip().splitlines()
    ] == lines
