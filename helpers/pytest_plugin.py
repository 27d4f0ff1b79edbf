"""A fixture for the tests of other projects: GPUs on a machine that has none.

    def test_the_head_stays_on_the_first_gpu(simulated_gpus):
        model = MyModel().to("cuda:1")
        assert model.head.weight.device == torch.device("cuda:0")

    @pytest.mark.simulated_gpus(2, card="T4", memory="1GB")
    def test_it_fits(simulated_gpus): ...

pytest finds it by itself where `helpers` is installed. Nothing of it is imported before
a test asks for it.
"""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "simulated_gpus(number=4, card='A100', memory=None, races='raise'): which GPUs "
        "the fixture simulated_gpus simulates; the arguments of helpers.simgpu.start",
    )


@pytest.fixture
def simulated_gpus(request: pytest.FixtureRequest):
    """Four simulated GPUs, or those of the test's mark, until the test is over.

    Yields:
        `helpers.simgpu`: `timeline()` is what ran, `count()` how many GPUs there are.
    """
    from helpers import simgpu

    mark = request.node.get_closest_marker("simulated_gpus")
    simgpu.start(*(mark.args if mark else ()), **(mark.kwargs if mark else {}))
    try:
        yield simgpu
    finally:
        simgpu.stop()
