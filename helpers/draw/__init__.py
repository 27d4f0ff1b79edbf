"""Pictures that draw themselves in a notebook, as SVG of our own.

The same device has the same colour in every lesson. Every picture has a title, which
screen readers speak, and looks the same on every machine, so that tests compare it.

    averaging.py    ways to average gradients: what ranks compute and send
    budgets.py      what ways to train a step take, beside what the card has
    memory_bars.py  what memory is made of at several moments, predicted and counted
    meshes.py       groups of a mesh on their nodes; what each rank has of a model
    network_steps.py  one step of a rank on several nodes: computing, and each link
    precision.py    numbers of 16 bits, and where a step of mixed precision has them
    loss_curves.py  curves of one training in several ways, and their distances
    loaders.py      what loader workers and the GPU do when
    exposed.py      what a rank computes, and the messages that nothing hides
    slice_times.py  a table: times of a block that is cut over four GPUs
    two_matmuls.py  two matmuls cut by columns and by rows: which rank has which slice
    stages.py       what each GPU of a split model does when
    pipelines.py    schedules of a pipeline on one axis: tasks of each rank, bubbles
    steps.py        one step of several runs on one axis: copying, computing, idle
    sharded_steps.py  a step with sharded parameters: computing, gathers, waits
    roofline.py     what a card can reach, and the kernels below it
    stopwatches.py  what a clock reads of a step that is launched and then computed
    hidden_copies.py  a loop over batches: copies and computing, each way on one axis
    data_parallel.py  the four functions of nn.DataParallel; weights reach all GPUs
    shared_step.py  one step of nn.DataParallel: what each GPU does when
    copy_path.py    from CPU memory to the GPU: who copies, whether Python waits
    before_after.py   what each rank has before and after several collectives
    conversations.py  who sends to whom and when, several programs on one axis
    course_map.py   the lessons of the course
    elastic_job.py  agents that meet; a job that is killed and restarted, step by step
    experts.py      tokens travel to the rank of their expert
    published_runs.py  predicted beside published rates, a row for each run
    equal_ranks.py  which values all ranks have alike
    ring_attention.py  attention over ranks: who computes what, and when
    sharing.py      one tensor in two processes, and a lost update
    verdicts.py     claims and their cases: which hold, which fail, which are open
    visible.py      which cards a program sees, and what it calls them

Of simgpu are `Picture` with the colours, `Lanes`, on which all pictures of what runs
when are drawn, and pictures of timelines, of jobs and of memory.
"""

from helpers.draw.averaging import averaging
from helpers.draw.before_after import before_after
from helpers.draw.budgets import Budget, budgets
from helpers.draw.conversations import conversations
from helpers.draw.copy_path import copy_path
from helpers.draw.course_map import ON_RANKS, course_map
from helpers.draw.data_parallel import four_functions, star_and_chain
from helpers.draw.elastic_job import agents_meet, elastic_job
from helpers.draw.equal_ranks import equal_ranks
from helpers.draw.experts import tokens_to_experts
from helpers.draw.exposed import exposed
from helpers.draw.hidden_copies import hidden_copies
from helpers.draw.loaders import loaders
from helpers.draw.loss_curves import loss_curves
from helpers.draw.memory_bars import memory_bars
from helpers.draw.meshes import mesh, mesh_ways
from helpers.draw.network_steps import network_steps
from helpers.draw.pipelines import bubble, pipelines
from helpers.draw.precision import mixed_step, number_formats
from helpers.draw.published_runs import published_runs
from helpers.draw.ring_attention import (
    attention_squares,
    attention_times,
    online_softmax,
)
from helpers.draw.roofline import roofline
from helpers.draw.sharded_steps import sharded_steps
from helpers.draw.shared_step import shared_step
from helpers.draw.sharing import lost_update, shared_tensor
from helpers.draw.slice_times import slice_times
from helpers.draw.stages import stages
from helpers.draw.steps import steps
from helpers.draw.stopwatches import stopwatches
from helpers.draw.two_matmuls import two_matmuls
from helpers.draw.verdicts import verdicts
from helpers.draw.visible import visible_cards
from simgpu.pictures import (
    COLOURS,
    HOST,
    INK,
    WIDEST,
    Picture,
    colour,
    devices,
    job_memory,
    job_timeline,
    overlap,
    parts,
    schedule,
    segment_picture,
    segments,
    timeline,
)

__all__ = [
    "Budget", "COLOURS", "HOST", "INK", "ON_RANKS", "Picture", "WIDEST", "agents_meet",
    "attention_squares", "attention_times", "averaging", "before_after", "bubble",
    "budgets", "colour", "conversations", "copy_path", "course_map", "devices",
    "elastic_job", "equal_ranks", "exposed", "four_functions", "hidden_copies",
    "job_memory", "job_timeline", "loaders", "loss_curves", "lost_update",
    "memory_bars", "mesh", "mesh_ways", "mixed_step", "network_steps", "number_formats",
    "online_softmax", "overlap", "parts", "pipelines", "published_runs", "roofline",
    "schedule", "segment_picture", "segments", "sharded_steps", "shared_step",
    "shared_tensor", "slice_times", "stages", "star_and_chain", "steps", "stopwatches",
    "timeline", "tokens_to_experts", "two_matmuls", "verdicts", "visible_cards",
]  # fmt: skip
