"""Explorers: sliders that redraw a picture, for a lesson's what-if questions.

One file for each explorer. The functions that calculate what it draws are public as
well, since lessons and exercises use them.
"""

from helpers.explore.caching_allocator import allocator, allocator_picture
from helpers.explore.loss_scale import loss_scale, loss_scale_picture, loss_scale_shares
from helpers.explore.pipeline_schedule import (
    most_held,
    pipeline,
    pipeline_order,
    pipeline_picture,
    pipeline_times,
)
from helpers.explore.ring_all_reduce import ring, ring_picture, ring_states
from helpers.explore.roofline import roofline, roofline_picture, step_kernels
from helpers.explore.sharded_state import shards, shards_bytes
from helpers.explore.stream_overlap import overlap, overlap_picture, overlap_times

__all__ = [
    "allocator", "allocator_picture", "loss_scale", "loss_scale_picture",
    "loss_scale_shares", "most_held", "overlap", "overlap_picture", "overlap_times",
    "pipeline", "pipeline_order", "pipeline_picture", "pipeline_times", "ring",
    "ring_picture", "ring_states", "roofline", "roofline_picture", "shards",
    "shards_bytes", "step_kernels",
]  # fmt: skip
