"""`helpers.simgpu` is the package `simgpu` under its name in the lessons.

The same modules, not copies of them: `helpers.simgpu.startup` is `simgpu.startup`.
`python -m helpers.simgpu` runs `python -m simgpu`.
"""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.util import spec_from_loader

import simgpu
from simgpu.device.job_memory import JobMemory
from simgpu.timing.job import JobTimeline
from simgpu.timing.timeline import Timeline

_NAME = "helpers.simgpu"


class _Existing(Loader):
    """Loads a module that is there already."""

    def __init__(self, module):
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec):
        return self.module

    def exec_module(self, module):
        module.__spec__ = self.spec  # the import system has put another one there


class _SameModules(MetaPathFinder):
    """Finds `helpers.simgpu.x` in `simgpu.x`."""

    def find_spec(self, name, path=None, target=None):
        if not name.startswith(f"{_NAME}."):
            return None
        module = importlib.import_module(name.removeprefix("helpers."))
        return spec_from_loader(name, _Existing(module))


def _draw(timeline: Timeline):
    from helpers import draw

    return draw.timeline(timeline)


def _draw_job(timeline: JobTimeline):
    from helpers import draw

    return draw.job_timeline(timeline)


def _draw_memory(memory: JobMemory):
    from helpers import draw

    return draw.job_memory(memory)


if __name__ == "__main__":
    from simgpu.__main__ import main

    main()
else:
    sys.meta_path.insert(0, _SameModules())
    sys.modules[_NAME] = simgpu
    Timeline.painter = staticmethod(_draw)
    JobTimeline.painter = staticmethod(_draw_job)
    JobMemory.painter = staticmethod(_draw_memory)
