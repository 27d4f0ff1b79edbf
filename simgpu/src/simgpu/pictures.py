"""Pictures of what ran and of memory, as SVG that a notebook shows.

    pictures.timeline(simgpu.timeline())     # as the timeline draws itself
    picture = pictures.Picture(400, 60, "what it shows, for who cannot see it")
    picture.box(10, 10, 80, 40, pictures.COLOURS[0])

`timeline`, `job_timeline`, `overlap` and `schedule` have time from left to right;
`devices` shows what travels between host and GPUs; `segments`, `segment_picture`,
`parts` and `job_memory` show memory. The rest is what they are made of, for pictures
of your own in the same colours.
"""

from simgpu._pictures.jobs import job_memory, job_timeline, overlap
from simgpu._pictures.lanes import Lanes
from simgpu._pictures.memory_pictures import devices, parts, segment_picture, segments
from simgpu._pictures.picture import (
    COLOURS,
    HOST,
    INK,
    WIDEST,
    Picture,
    colour,
    plural,
    size_text,
)
from simgpu._pictures.timelines import schedule, timeline

__all__ = [
    "COLOURS", "HOST", "INK", "Lanes", "Picture", "WIDEST", "colour", "devices",
    "job_memory", "job_timeline", "overlap", "parts", "plural", "schedule",
    "segment_picture", "segments", "size_text", "timeline",
]  # fmt: skip
