"""Pictures that draw themselves in a notebook, as SVG of our own.

The same device has the same colour in every lesson. Every picture has a title, which
screen readers speak, and looks the same on every machine, so that tests compare it.

    averaging.py    ways to average gradients: what ranks compute and send
    memory_bars.py  what memory is made of at several moments, predicted and counted
    memory_over_time.py  what lives on a GPU during a step, from the allocator's history
    meshes.py       groups of a mesh on their nodes; what each rank has of a model
    precision.py    numbers of 16 bits, and where a step of mixed precision has them
    loss_curves.py  losses and gradient norms of a right and a wrong training
    loaders.py      the path of a batch to the GPU; a GPU that waits for batches
    dealt_samples.py  which rank gets which samples, and what a step has
    exposed.py      what a rank computes, and the messages that nothing hides
    two_matmuls.py  two matmuls cut by columns and by rows: which rank has which slice
    stages.py       what each GPU of a split model does when
    pipelines.py    schedules of a pipeline on one axis: tasks of each rank, bubbles
    steps.py        one step of several runs on one axis: copying, computing, idle
    sharded_steps.py  a step with sharded parameters: computing, gathers, waits
    roofline.py     what a card can reach, and the kernels below it
    stopwatches.py  what a clock reads of a step that is launched and then computed
    hidden_copies.py  a loop over batches: copies and computing, each way on one axis
    data_parallel.py  the four functions of nn.DataParallel
    shared_step.py  one step of nn.DataParallel: what each GPU does when
    copy_path.py    from CPU memory to the GPU: who copies, whether Python waits
    before_after.py   what each rank has before and after several collectives
    course_map.py   the lessons of the course, by parts, and what each builds on
    conversations.py  who sends to whom and when, or in which stream; several programs
    elastic_job.py  agents that meet; a job that is killed and restarted, step by step
    experts.py      tokens travel to the rank of their expert
    published_runs.py  predicted beside published rates, a line for each model and card
    equal_ranks.py  which values all ranks have alike
    references.py   names of a program, their tensors, and where these are
    races.py        a read that comes too early; memory that is used again
    ring_attention.py  attention over ranks: who computes what, and when
    sharing.py      what travels through a queue, and who must live; a lost update
    verdicts.py     claims and their cases: which hold, which fail, which are open
    visible.py      which cards a program sees, and what it calls them

Of simgpu are `Picture` with the colours, `Lanes`, on which all pictures of what runs
when are drawn, and pictures of timelines, of jobs and of memory.
"""

from helpers.draw.averaging import averaging
from helpers.draw.before_after import before_after
from helpers.draw.conversations import conversations, streams_of_rank
from helpers.draw.copy_path import copy_path
from helpers.draw.course_map import ON_RANKS, course_map
from helpers.draw.data_parallel import four_functions
from helpers.draw.dealt_samples import dealt_samples
from helpers.draw.elastic_job import agents_meet, elastic_job
from helpers.draw.equal_ranks import equal_ranks
from helpers.draw.experts import tokens_to_experts
from helpers.draw.exposed import exposed
from helpers.draw.hidden_copies import hidden_copies
from helpers.draw.loaders import batch_path, fed_gpu
from helpers.draw.loss_curves import loss_curves
from helpers.draw.memory_bars import memory_bars
from helpers.draw.memory_over_time import memory_over_time
from helpers.draw.meshes import mesh, mesh_ways
from helpers.draw.pipelines import bubble, pipelines
from helpers.draw.precision import mixed_step, number_formats
from helpers.draw.published_runs import published_runs
from helpers.draw.races import early_read, reused_memory
from helpers.draw.references import references
from helpers.draw.ring_attention import (
    attention_squares,
    attention_times,
    online_softmax,
    ring_hop,
)
from helpers.draw.roofline import roofline
from helpers.draw.sharded_steps import block_life, sharded_steps
from helpers.draw.shared_step import shared_step
from helpers.draw.sharing import old_gradient, sent_through_a_queue
from helpers.draw.stages import stages
from helpers.draw.steps import steps
from helpers.draw.stopwatches import stopwatches
from helpers.draw.two_matmuls import f_and_g, two_matmuls
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
    "COLOURS", "HOST", "INK", "ON_RANKS", "Picture", "WIDEST", "agents_meet",
    "attention_squares", "attention_times", "averaging", "batch_path", "before_after",
    "block_life", "bubble", "colour", "conversations", "copy_path", "course_map",
    "dealt_samples", "devices", "early_read", "elastic_job", "equal_ranks", "exposed",
    "f_and_g", "fed_gpu", "four_functions", "hidden_copies", "job_memory",
    "job_timeline", "loss_curves", "memory_bars", "memory_over_time", "mesh",
    "mesh_ways", "mixed_step", "number_formats", "old_gradient", "online_softmax",
    "overlap", "parts", "pipelines", "published_runs", "references", "reused_memory",
    "ring_hop", "roofline", "schedule", "segment_picture", "segments",
    "sent_through_a_queue", "sharded_steps", "shared_step", "stages", "steps",
    "stopwatches", "streams_of_rank", "timeline", "tokens_to_experts", "two_matmuls",
    "verdicts", "visible_cards",
]  # fmt: skip
