"""`simgpu prove` over the trainers: samples, gradients, norms, updates of each step.

Left out are stages.py and whole.py: `prove` aligns steps by modules, and in a pipeline
each rank has other ones. `test_trainers.py` compares them with one GPU.
"""

import pytest

import simgpu
from tests.launching import SCRIPTS
from tests.test_trainers import COMMON, text

WAYS = {  # trainer -> its options on any number of ranks
    "ddp": "--size=tiny",
    "fsdp": "--size=tiny-tied --recompute",
    "slices": "--size=tiny",
    "long": "--size=tiny --cp={ranks}",
    "ring": "--size=tiny --cp={ranks} --context=128 --batch=8",
    "experts": "--size=tiny-experts --ep={ranks}",
    "meshes": "--size=tiny --tp={ranks}",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer",
    [
        pytest.param(name, marks=() if name == "meshes" else pytest.mark.long)
        for name in WAYS
    ],
)
def test_two_ranks_take_the_steps_of_one(trainer, tmp_path):
    data = text()
    if trainer == "ring":
        data = data.replace(b"\0", b" ")  # takes no documents
    (tmp_path / "text").write_bytes(data)
    words = f"{COMMON} {WAYS[trainer]} --steps=2".split()
    words[0] = f"--data={tmp_path / 'text'}"
    report = simgpu.assert_same_on_worlds(
        SCRIPTS / "trainer" / f"{trainer}.py", (1, 2), arguments=words, steps=2
    )
    assert report.steps == 2
