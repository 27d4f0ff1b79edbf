"""The ranks of a notebook, from one start to their end.

They start together and form one process group, so if one is lost all are ended and a
new `WorkerGroup` takes their place.
"""

import os
import sys
import time

from simgpu._ranks import worker
from simgpu._ranks.output import Output
from simgpu._ranks.python_process import START_SECONDS
from simgpu._ranks.rank_error import Frame, RankError
from simgpu._ranks.rank_processes import RankProcesses
from simgpu._ranks.remote_call import RemoteCall
from simgpu._ranks.which_gpus import Gpus
from simgpu._ranks.worker import WorkerSettings


class WorkerGroup(RankProcesses):
    """One process for each rank, all in one process group.

    Args:
        size: how many ranks.
        gpus: of the ranks; None: they are on the CPU.
        timeout: seconds before a collective gives up.
        threads: of PyTorch in each rank.

    Attributes:
        outputs: item r is what rank r prints.
        took: seconds until they were up.

    Raises:
        RankError: if the ranks do not come up.
    """

    def __init__(self, size: int, gpus: Gpus | None, timeout: float, threads: int):
        super().__init__()
        self.took = 0.0
        begin = time.monotonic()
        self.outputs = [
            Output(rank, worker.output_file(self.folder, rank)) for rank in range(size)
        ]
        settings = WorkerSettings(
            world_size=size,
            gpus=gpus,
            timeout=timeout,
            threads=threads,
            module_path=sys.path,
            cwd=os.getcwd(),
            environ=dict(os.environ),
        )
        try:
            self.start(worker.run_worker, size, settings, with_store=gpus is not None)
            self._wait_for_process_group()
            self.took = time.monotonic() - begin
        except BaseException:
            self.close()
            raise

    def _wait_for_process_group(self) -> None:
        call = RemoteCall(self)  # of nothing: each rank answers once when it is up
        call.wait(START_SECONDS)
        if report := call.finish():
            raise RankError(f"the ranks did not come up:\n{report}")

    def where(self, rank: int) -> list[Frame]:
        """Where a rank is, outermost first; empty if it cannot tell."""
        return self.stack(rank, worker.__file__)
