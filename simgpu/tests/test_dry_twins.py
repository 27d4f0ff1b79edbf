"""A dry run beside the same program with values: the same bytes, the same times.

The programs are those of `test_cluster.py`: with values, each agrees with one process;
and networks for pictures.
"""

import json
from pathlib import Path

import pytest

from support import programs

SUPPORT = Path(__file__).parent / "support"
SCRIPTS = Path(__file__).parent / "scripts" / "cluster"
RUNS = [  # a program, its ranks, which of them run in the dry run, its arguments
    ("gpt", 2, None, "--dtype=float32"),
    ("gpt", 4, None, "--dtype=bfloat16"),
    ("gpt", 8, None, "--dtype=float16"),
    ("fsdp2", 2, None),
    ("fsdp2", 4, None, "--reshard=no", "--prefetch"),
    ("fsdp2", 8, None, "--reshard=2", "--clip=100"),
    ("fsdp2_mixed", 4, None),
    ("tensor_parallel", 4, None),
    ("tensor_parallel", 2, None, "--loss-parallel"),
    ("tensor_parallel", 4, None, "--sequence", "--loss-parallel"),
    ("two_d", 4, None),
    ("two_d", 8, None, "--replicas=2"),
    ("three_d", 8, "pp=2"),
    ("fsdp2_tp_gpt", 8, None, "--steps=3"),
    ("pipeline", 4, "pp=4"),
    ("context_parallel", 4, None, "--kernel=efficient"),
    ("context_parallel", 4, None, "--kernel=flash"),
    ("memory", 2, None),
    ("ring_attention", 4, None),
    ("vision", 1, None, "resnet", "--last", "--half"),
    ("vision", 1, None, "convnext"),
    ("vision", 1, None, "efficientnet", "--last", "--half"),
    ("vision", 1, None, "unet", "--last"),
    ("vision", 1, None, "vit"),
    ("vision", 1, None, "volumes", "--half"),
]


LONG = [  # for most of a minute
    ("fsdp2_mixed", 4, None), ("two_d", 4, None), ("pipeline", 4, "pp=4"),
    ("memory", 2, None), ("ddp_all", 4, None), ("fsdp1", 4, None),
]  # fmt: skip

# in which ranks differ, though of one kind: rank 0 waits for another now and then
UNEVEN = [
    ("ddp_all", 4, None),
    ("ddp_kinds", 2, None),
    ("fsdp1", 4, None),
]


def both(folder: Path, program: tuple) -> tuple[dict, dict]:
    """What the first rank did, without values and with them: the bytes are equal."""
    name, ranks, kinds, *arguments = program
    script = SCRIPTS / f"{name}.py"
    real, dry = folder / "real.json", folder / "dry.json"
    done = programs.in_ranks(
        folder, ranks, SUPPORT / "twin.py", real, script, *arguments
    )
    assert done.status == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"ok {name}: "), done.stdout
    words = ["dry-run", "--world", ranks, "--node", ranks, "--card", "A100"]
    words += ["--steps", 1000] + (["--kinds", kinds] if kinds else [])
    done = programs.simulated(
        folder, *words, SUPPORT / "twin.py", dry, script, *arguments
    )
    assert dry.exists(), done.stderr
    found, expected = (json.loads(path.read_text()) for path in (dry, real))
    assert found["peak"] == expected["peak"]
    assert found["reserved"] == expected["reserved"]
    return found, expected


def each(runs: list[tuple]) -> pytest.MarkDecorator:
    """A test for each of these programs, with its words as its name."""
    long = [run[1] == 8 or run in LONG for run in runs]
    params = [
        pytest.param(run, marks=pytest.mark.long if is_long else ())
        for run, is_long in zip(runs, long, strict=True)
    ]
    return pytest.mark.parametrize(
        "program", params, ids=lambda run: " ".join(map(str, run))
    )


@pytest.mark.slow
@each(RUNS)
def test_a_dry_run_has_the_bytes_and_times_of_the_run_with_values(tmp_path, program):
    found, expected = both(tmp_path, program)
    assert found["seconds"] == pytest.approx(expected["seconds"], rel=1e-9)
    if program[0] == "pipeline":  # zero bubble goes through sets of autograd's nodes
        names = [sorted(e[:5] for e in its["events"]) for its in (found, expected)]
        assert names[0] == names[1]
        return
    assert len(found["events"]) == len(expected["events"])
    for ours, theirs in zip(found["events"], expected["events"], strict=True):
        assert ours[:5] == theirs[:5]
        assert ours[5:] == pytest.approx(theirs[5:], rel=1e-9, abs=1e-11)


@pytest.mark.slow
@each(UNEVEN)
def test_where_ranks_differ_a_little_bytes_are_the_same(tmp_path, program):
    found, expected = both(tmp_path, program)
    assert found["seconds"] == pytest.approx(expected["seconds"], rel=1e-2)
    names = [[event[1] for event in its["events"]] for its in (found, expected)]
    assert names[0] == names[1]
