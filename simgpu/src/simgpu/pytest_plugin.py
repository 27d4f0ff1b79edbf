"""Fixtures for the tests of other projects: GPUs on a machine that has none.

    def test_the_head_stays_on_the_first_gpu(simulated_gpus):
        model = MyModel().to("cuda:1")
        assert model.head.weight.device == torch.device("cuda:0")

    @pytest.mark.simulated_gpus(2, card="T4", memory="1GB")
    def test_it_fits(): ...

    pytest --simulated-gpus 4       # the whole run, for tests that ask device_count()

    def train():                    # on each rank, as torchrun would run a script
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
        ...
        return loss.item()

    def test_all_ranks_have_one_loss(simulated_ranks):
        assert len(set(simulated_ranks(train, 4))) == 1

    def test_it_fits_on_64_cards(simulated_dry_run):    # one rank, without its values
        report = simulated_dry_run("train.py", "--batch", "4", world=64, card="H100")
        assert report.fits and report.peak_bytes < 70 * 2**30

pytest finds it by itself where `simgpu` is installed. Nothing of it is imported before
it is asked for. The GPUs are simulated even where there are real ones, as long as these
are not in use in the same process. Processes that a test starts have none, other than
those of `simulated_ranks`.
"""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

NAME = "simulated_gpus"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--simulated-gpus", type=int, metavar="N", help="of all tests, from the start"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{NAME}(number=4, card='A100', memory=None, races='raise'): run the test with "
        "these GPUs, the arguments of simgpu.start",
    )
    if config.option.simulated_gpus is not None:
        _start(config.option.simulated_gpus)


def pytest_unconfigure(config: pytest.Config) -> None:
    if config.option.simulated_gpus is not None:
        _stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:  # the mark alone is enough
        names = getattr(item, "fixturenames", None)
        if names is not None and item.get_closest_marker(NAME) and NAME not in names:
            names.insert(0, NAME)


@pytest.fixture
def simulated_gpus(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """Four simulated GPUs, or those of the test's mark, until the test is over.

    Yields:
        `simgpu`: `timeline()` is what ran, `count()` how many GPUs there are.
    """
    mark = request.node.get_closest_marker(NAME)
    of_all = request.config.option.simulated_gpus
    if of_all is not None:
        _stop()
    try:
        simgpu = _start(*(mark.args if mark else ()), **(mark.kwargs if mark else {}))
    except (TypeError, ValueError) as error:
        pytest.fail(f"@pytest.mark.{NAME}: {error}", pytrace=False)
    try:
        yield simgpu
    finally:
        _stop()
        if of_all is not None:
            _start(of_all)


@pytest.fixture
def simulated_ranks() -> Callable[..., list[Any]]:
    """Calls a function on N ranks, each with a simulated GPU, as torchrun would.

    Returns:
        `run_ranks(function, ranks, *args, card=..., memory=..., nodes=1, network=None,
        seconds=180)`: see `simgpu.run_ranks`. It returns what each rank has returned.
    """
    from simgpu._ranks.run_ranks import run_ranks

    return run_ranks


@pytest.fixture
def simulated_dry_run() -> Callable[..., Any]:
    """Runs a program as one rank of any number, without its values.

        def test_it_fits(simulated_dry_run):
            assert simulated_dry_run("train.py", "--batch", "4", world=64).fits

    Returns:
        `dry_run(script or function, *arguments, world=64, node=None, card="H100",
        network=None, memory=None, kinds=None, ...)`: see `simgpu.dry_run`. It returns
        a `simgpu.DryReport`. A script, found from the current directory, runs in a
        process of its own; a function in this one.
    """
    from simgpu._dry.api import dry_run

    return dry_run


def _start(*args: Any, **kwargs: Any) -> ModuleType:
    import simgpu

    simgpu.start(*args, **kwargs)
    return simgpu


def _stop() -> None:
    """End the simulation, and a process group that a test has left."""
    import torch.distributed as dist

    import simgpu

    if simgpu.count() and dist.is_initialized():
        dist.destroy_process_group()
    simgpu.stop()
