"""Pictures that draw themselves in a notebook, as SVG of our own.

The same device has the same colour in every lesson. Every picture has a title, which
screen readers speak, and looks the same on every machine, so that tests compare it.

    picture.py      Picture, an SVG under construction, and the colours
    averaging.py    ways to average gradients: what ranks compute and send
    budgets.py      what ways to train a step take, beside what the card has
    memory.py       which tensor is on which device; what a GPU's memory is made of
    memory_bars.py  what memory is made of at several moments, predicted and counted
    jobs.py         what runs when on all ranks of a job, and their memory
    mesh_costs.py   tables: bytes and times of ways on eight GPUs
    meshes.py       groups of a mesh on their nodes; what each rank has of a model
    timelines.py    what runs when: streams of GPUs, stages of a pipeline
    precision.py    numbers of 16 bits, and where a step of mixed precision has them
    loaders.py      what loader workers and the GPU do when
    exposed.py      what a rank computes, and the messages that nothing hides
    slice_times.py  a table: times of a block that is cut over four GPUs
    two_matmuls.py  two matmuls cut by columns and by rows: which rank has which slice
    stages.py       what each GPU of a split model does when
    steps.py        one step of several runs on one axis: copying, computing, idle
    sharded_steps.py  a step with sharded parameters: computing, gathers, waits
    roofline.py     what a card can reach, and the kernels below it
    stopwatches.py  what a clock reads of a step that is launched and then computed
    hidden_copies.py  a loop over batches: copies and computing, each way on one axis
    data_parallel.py  the four functions of nn.DataParallel; weights reach all GPUs
    shared_step.py  one step of nn.DataParallel: what each GPU does when
    copy_path.py    from CPU memory to the GPU: who copies, whether Python waits
    collectives.py  what each rank holds before and after a collective
    before_after.py   the same for several collectives, number by number
    conversations.py  who sends to whom and when, several programs on one axis
    course_map.py   the lessons of the course
    equal_ranks.py  which values all ranks have alike
    sharing.py      one tensor in two processes, and a lost update
    visible.py      which cards a program sees, and what it calls them
"""

from helpers.draw.averaging import averaging
from helpers.draw.before_after import before_after
from helpers.draw.budgets import Budget, budgets
from helpers.draw.collectives import collective
from helpers.draw.conversations import conversations
from helpers.draw.copy_path import copy_path
from helpers.draw.course_map import ON_RANKS, course_map
from helpers.draw.data_parallel import four_functions, star_and_chain
from helpers.draw.equal_ranks import equal_ranks
from helpers.draw.exposed import exposed
from helpers.draw.hidden_copies import hidden_copies
from helpers.draw.jobs import job_memory, job_timeline, overlap
from helpers.draw.loaders import loaders
from helpers.draw.memory import devices, parts, segment_picture, segments
from helpers.draw.memory_bars import memory_bars
from helpers.draw.mesh_costs import mesh_bytes, mesh_times
from helpers.draw.meshes import mesh, mesh_ways
from helpers.draw.picture import COLOURS, HOST, INK, WIDEST, Picture, colour
from helpers.draw.precision import mixed_step, number_formats
from helpers.draw.roofline import roofline
from helpers.draw.sharded_steps import sharded_steps
from helpers.draw.shared_step import shared_step
from helpers.draw.sharing import lost_update, shared_tensor
from helpers.draw.slice_times import slice_times
from helpers.draw.stages import stages
from helpers.draw.steps import steps
from helpers.draw.stopwatches import stopwatches
from helpers.draw.timelines import schedule, timeline
from helpers.draw.two_matmuls import two_matmuls
from helpers.draw.visible import visible_cards

__all__ = [
    "Budget", "COLOURS", "HOST", "INK", "ON_RANKS", "Picture", "WIDEST", "averaging",
    "before_after", "budgets", "collective", "colour", "conversations", "copy_path",
    "course_map", "devices", "equal_ranks", "exposed", "four_functions",
    "hidden_copies", "job_memory", "job_timeline", "loaders", "lost_update",
    "memory_bars", "mesh", "mesh_bytes", "mesh_times", "mesh_ways", "mixed_step",
    "number_formats", "overlap", "parts", "roofline", "schedule", "segment_picture",
    "segments", "sharded_steps", "shared_step", "shared_tensor", "slice_times",
    "stages", "star_and_chain", "steps", "stopwatches", "timeline", "two_matmuls",
    "visible_cards",
]  # fmt: skip
