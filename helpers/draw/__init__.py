"""Pictures that draw themselves in a notebook, as SVG of our own.

The same device has the same colour in every lesson. Every picture has a title, which
screen readers speak, and looks the same on every machine, so that tests compare it.

    picture.py      Picture, an SVG under construction, and the colours
    memory.py       which tensor is on which device; what a GPU's memory is made of
    jobs.py         what runs when on all ranks of a job, and their memory
    timelines.py    what runs when: streams of GPUs, stages of a pipeline
    roofline.py     what a card can reach, and the kernels below it
    stopwatches.py  what a clock reads of a step that is launched and then computed
    collectives.py  what each rank holds before and after a collective
    course_map.py   the lessons of the course
"""

from helpers.draw.collectives import collective
from helpers.draw.course_map import ON_RANKS, course_map
from helpers.draw.jobs import job_memory, job_timeline, overlap
from helpers.draw.memory import (
    devices,
    history,
    parts,
    segment_picture,
    segments,
)
from helpers.draw.picture import COLOURS, HOST, INK, WIDEST, Picture, colour
from helpers.draw.roofline import roofline
from helpers.draw.stopwatches import stopwatches
from helpers.draw.timelines import schedule, timeline

__all__ = [
    "COLOURS", "HOST", "INK", "ON_RANKS", "Picture", "WIDEST", "collective", "colour",
    "course_map", "devices", "history", "job_memory", "job_timeline", "overlap",
    "parts", "roofline", "schedule", "segment_picture", "segments", "stopwatches",
    "timeline",
]  # fmt: skip
