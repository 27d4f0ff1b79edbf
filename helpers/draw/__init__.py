"""Pictures that draw themselves in a notebook, as SVG of our own.

The same device has the same colour in every lesson. Every picture has a title, which
screen readers speak, and looks the same on every machine, so that tests compare it.

    picture.py      Picture, an SVG under construction, and the colours
    memory.py       which tensor is on which device; what a GPU's memory is made of
    jobs.py         what runs when on all ranks of a job, and their memory
    timelines.py    what runs when: streams of GPUs, stages of a pipeline
    hidden_copies.py  a loop over batches: copies and computing, each way on one axis
    copy_path.py    from CPU memory to the GPU: who copies, whether Python waits
    collectives.py  what each rank holds before and after a collective
    course_map.py   the lessons of the course
"""

from helpers.draw.collectives import collective
from helpers.draw.copy_path import copy_path
from helpers.draw.course_map import ON_RANKS, course_map
from helpers.draw.hidden_copies import hidden_copies
from helpers.draw.jobs import job_memory, job_timeline, overlap
from helpers.draw.memory import (
    devices,
    history,
    parts,
    segment_picture,
    segments,
)
from helpers.draw.picture import COLOURS, HOST, INK, WIDEST, Picture, colour
from helpers.draw.timelines import schedule, timeline

__all__ = [
    "COLOURS", "HOST", "INK", "ON_RANKS", "Picture", "WIDEST", "collective", "colour",
    "copy_path", "course_map", "devices", "hidden_copies", "history", "job_memory",
    "job_timeline", "overlap", "parts", "schedule", "segment_picture", "segments",
    "timeline",
]  # fmt: skip
