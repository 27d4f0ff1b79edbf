"""Explorers: sliders that redraw a picture, for a lesson's what-if questions.

Core ipywidgets only, so that they work in JupyterLab, on Binder and in Colab, with
versions 7 and 8. A reader without a kernel sees the picture of the first setting.
"""

import ipywidgets
import torch
from IPython.display import display

from helpers import draw
from helpers import plan as planning
from helpers.simgpu.cards import CARDS, GIB, MIB, find_card
from helpers.simgpu.clock import COPY_LATENCY
from helpers.simgpu.memory import Memory


class Explorer(ipywidgets.VBox):
    """Controls above a picture that follows them.

    Args:
        picture: function of the controls' values, by name, to a `draw.Picture`.
        controls: name=widget with a value.
    """

    def __init__(self, picture, **controls):
        self._picture = picture
        self.controls = controls
        self.html = ipywidgets.HTML()
        for control in controls.values():
            control.continuous_update = False
            control.observe(lambda _: self.render(), "value")
        super().__init__([*controls.values(), self.html])
        self.render()

    @property
    def values(self) -> dict:
        """What the controls say now."""
        return {name: control.value for name, control in self.controls.items()}

    def render(self) -> None:
        """Draw the picture anew; in a narrow window the one on the page shrinks."""
        self._svg = self._picture(**self.values)._repr_svg_()
        narrow = '<svg style="max-width: 100%; height: auto" '
        self.html.value = self._svg.replace("<svg ", narrow, 1)

    def _ipython_display_(self, **_) -> None:
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        settings = ", ".join(f"{name}={value!r}" for name, value in self.values.items())
        bundle = {
            "application/vnd.jupyter.widget-view+json": view,
            "image/svg+xml": self._svg,
            "text/plain": f"Explorer({settings})",
        }
        display(bundle, raw=True)


def _slider(text: str, value: int, least: int, most: int) -> ipywidgets.IntSlider:
    return ipywidgets.IntSlider(
        value,
        least,
        most,
        description=text,
        style={"description_width": "160px"},
        layout={"width": "420px"},
    )


def _choice(text: str, options: tuple, value=None) -> ipywidgets.Dropdown:
    return ipywidgets.Dropdown(
        options=options,
        value=options[0] if value is None else value,
        description=text,
        style={"description_width": "160px"},
        layout={"width": "420px"},
    )


# -- memory ----------------------------------------------------------------------------

CARD = 64 * MIB  # of the allocator explorer
_FREE = ("none", "every second", "first half", "all")


def allocator() -> Explorer:
    """Tensors come, some go, one more is asked for: where does it find room?

    A GPU of 64 MiB of its own; the simulated GPUs of the notebook are not touched.

    Taught in 03-count-memory.
    """
    return Explorer(
        allocator_picture,
        tensors=_slider("tensors", 9, 1, 24),
        size=_slider("MiB of each", 6, 1, 24),
        free=_choice("then free", _FREE, "every second"),
        more=_slider("MiB of one more", 12, 1, 48),
    )


def allocator_picture(tensors: int, size: int, free: str, more: int) -> draw.Picture:
    """The segments after the story, and how it ended."""
    memory, blocks = Memory(0, CARD), []
    ending = ""
    try:
        for _ in range(tensors):
            blocks.append(memory.allocate(size * MIB))
    except torch.OutOfMemoryError:
        ending = f"out of memory at tensor {len(blocks) + 1} of {tensors}"
    goes = {
        "none": [], "every second": blocks[1::2], "all": blocks,
        "first half": blocks[: len(blocks) // 2],
    }[free]  # fmt: skip
    for block in goes:
        memory.free(block)
    before = memory.reserved
    unused = CARD - memory.allocated
    if not ending:
        try:
            memory.allocate(more * MIB)
            found = "in the cache" if memory.reserved == before else "in a new segment"
            ending = f"{more} MiB more: found {found}"
        except torch.OutOfMemoryError:
            ending = (
                f"{more} MiB more: out of memory with {unused // MIB} MiB not taken"
            )
    whose = "64 MiB of memory (simulated)"
    picture = draw.segment_picture(memory.snapshot(), whose, "cuda:0")
    picture.title += f". {ending}"
    picture.height += 24
    picture.text(8, picture.height - 10, ending, 14, weight="bold")
    return picture


# -- streams ---------------------------------------------------------------------------


def overlap() -> Explorer:
    """Copy and compute in chunks, on one stream and on two.

    Taught in 04-overlap-with-streams.
    """
    return Explorer(
        overlap_picture,
        chunks=_slider("chunks", 4, 1, 16),
        megabytes=_slider("MB to copy", 64, 1, 256),
        speed=_slider("GB/s of the link", 12, 1, 64),
        compute=_slider("ms to compute", 6, 1, 30),
    )


def overlap_times(
    chunks: int, megabytes: int, speed: int, compute: int
) -> list[tuple[float, float, float]]:
    """When each chunk's copy ends, its computing starts and ends, in seconds.

    The copies follow each other; a chunk is computed once it is there and the one
    before it is done.
    """
    copy = COPY_LATENCY + megabytes * 1e6 / chunks / (speed * 1e9)
    work = compute * 1e-3 / chunks
    times, free = [], 0.0
    for i in range(chunks):
        there = (i + 1) * copy
        start = max(there, free)
        free = start + work
        times.append((there, start, free))
    return times


def overlap_picture(
    chunks: int, megabytes: int, speed: int, compute: int
) -> draw.Picture:
    """Both schedules on one time axis, with their seconds."""
    times = overlap_times(chunks, megabytes, speed, compute)
    copy, work = times[0][0], times[0][2] - times[0][1]
    one, two = chunks * (copy + work), times[-1][2]
    title = (
        f"One stream {one * 1e3:.2f} ms, two streams {two * 1e3:.2f} ms (simulated): "
        f"{one / two:.2f} times as fast"
    )
    picture = draw.Picture(draw.WIDEST, 156, title)
    picture.text(8, 20, title, 14, weight="bold")
    scale = (draw.WIDEST - 120) / one

    def box(row, start, seconds, fill):
        x, y = 108 + start * scale, 34 + 38 * row
        picture.box(x, y, max(seconds * scale, 0.5), 30, fill)

    for row, words in enumerate(("one stream", "copy stream", "compute")):
        picture.text(8, 54 + 38 * row, words)
    for i, (there, start, _) in enumerate(times):
        box(0, i * (copy + work), copy, draw.HOST)
        box(0, i * (copy + work) + copy, work, draw.colour("cuda:0"))
        box(1, there - copy, copy, draw.HOST)
        box(2, start, work, draw.colour("cuda:0"))
    return picture


# -- ranks -----------------------------------------------------------------------------


def ring() -> Explorer:
    """A ring all-reduce, one step after the other.

    Taught in 12-talk-between-ranks.
    """
    return Explorer(
        ring_picture, ranks=_slider("ranks", 4, 2, 6), step=_slider("step", 2, 0, 10)
    )


def ring_states(ranks: int) -> list[list[list[frozenset[int]]]]:
    """Whose numbers are summed in each chunk of each rank, after every step.

    Returns:
        states[step][rank][chunk]: 2 (ranks - 1) steps after the start, which is step 0.
        First each rank adds what it gets from its left neighbour; once every chunk is
        complete in one rank, the complete chunks go round.
    """
    state = [[frozenset({rank})] * ranks for rank in range(ranks)]
    states = [[list(row) for row in state]]
    for step in range(2 * (ranks - 1)):
        before = states[-1]
        state = [list(row) for row in before]
        for rank in range(ranks):
            chunk = ring_chunk(ranks, rank, step)
            mine = before[(rank + 1) % ranks][chunk]
            state[(rank + 1) % ranks][chunk] = mine | before[rank][chunk]
        states.append(state)
    return states


def ring_chunk(ranks: int, rank: int, step: int) -> int:
    """The chunk that a rank sends to its right neighbour in a step (0 is the first)."""
    first = rank if step < ranks - 1 else rank + 1
    return (first - step % (ranks - 1)) % ranks


def ring_picture(ranks: int, step: int) -> draw.Picture:
    """The chunks of every rank after some steps: orange is new, green complete.

    A step after the last shows the last.
    """
    states = ring_states(ranks)
    step = min(step, len(states) - 1)
    part = "all done" if step == len(states) - 1 else "reduce-scatter"
    if ranks - 1 <= step < len(states) - 1:
        part = "all-gather"
    title = f"After step {step} of {len(states) - 1}: {part if step else 'the start'}"
    wide, tall = (draw.WIDEST - 84) // ranks, 34
    plus = " + " if ranks < 6 else "+"  # five numbers have to fit into a sixth
    picture = draw.Picture(draw.WIDEST, 64 + tall * ranks, title)
    picture.text(8, 20, title, 14, weight="bold")
    for rank, row in enumerate(states[step]):
        x = 76 + rank * wide
        picture.text(x + (wide - 12) / 2, 44, f"rank {rank}", 13, "middle")
        for chunk, summed in enumerate(row):
            y = 52 + tall * chunk
            whole = len(summed) == ranks
            fill = draw.COLOURS[2] if whole else "white"
            came = step > 0 and chunk == ring_chunk(ranks, (rank - 1) % ranks, step - 1)
            picture.box(x, y, wide - 12, tall - 6, draw.COLOURS[1] if came else fill)
            words = "all" if whole else plus.join(map(str, sorted(summed)))
            picture.text(x + (wide - 12) / 2, y + 19, words, 13, "middle")
    for chunk in range(ranks):
        picture.text(8, 71 + tall * chunk, f"chunk {chunk}", 13)
    return picture


# -- pipelines -------------------------------------------------------------------------


def pipeline() -> Explorer:
    """Stages that pass micro-batches on: who idles, and what each must keep.

    Taught in 11-split-the-model.
    """
    return Explorer(
        pipeline_picture,
        stages=_slider("stages", 4, 1, 6),
        micro_batches=_slider("micro-batches", 6, 1, 12),
        schedule=_choice("schedule", ("GPipe", "1F1B")),
        slowest=_slider("% of time, last stage", 100, 50, 300),
    )


def pipeline_order(
    schedule: str, stages: int, stage: int, micro_batches: int
) -> list[tuple[str, int]]:
    """What a stage does, in order: ("F", micro-batch) and ("B", micro-batch).

    GPipe: all forward, then all backward. 1F1B: as many forward as there are stages
    from here to the end, then backward and forward in turn.
    """
    ahead = min(stages - stage, micro_batches)
    if schedule == "GPipe":
        ahead = micro_batches
    order = [("F", m) for m in range(ahead)]
    for m in range(micro_batches):
        order.append(("B", m))
        if ahead + m < micro_batches:
            order.append(("F", ahead + m))
    return order


def pipeline_times(
    orders: list[list[tuple[str, int]]], seconds: list[float]
) -> list[list[tuple[str, int, float, float]]]:
    """When each stage does what: (kind, micro-batch, start, end).

    Forward waits for the stage before, backward for the stage after. Copies take no
    time.

    Args:
        orders: of each stage, from `pipeline_order`.
        seconds: of a forward pass of each stage; backward takes twice as long.

    Raises:
        ValueError: if the stages wait for each other for ever.
    """
    last, done = len(orders) - 1, {}
    rows: list[list] = [[] for _ in orders]
    while any(len(row) < len(order) for row, order in zip(rows, orders, strict=True)):
        before = len(done)
        for stage, (row, order) in enumerate(zip(rows, orders, strict=True)):
            while len(row) < len(order):
                kind, m = order[len(row)]
                needs = {("F", stage, m)} if kind == "B" else set()
                if stage != (0 if kind == "F" else last):
                    needs.add((kind, stage + (-1 if kind == "F" else 1), m))
                if not needs <= done.keys():
                    break
                free = row[-1][3] if row else 0.0
                start = max([free, *(done[need] for need in needs)])
                end = start + seconds[stage] * (1 if kind == "F" else 2)
                row.append((kind, m, start, end))
                done[kind, stage, m] = end
        if len(done) == before:
            raise ValueError("the stages wait for each other for ever")
    return rows


def most_held(row: list[tuple[str, int, float, float]]) -> int:
    """Micro-batches of which a stage keeps the activations, at most."""
    held = most = 0
    for kind, *_ in row:
        held += 1 if kind == "F" else -1
        most = max(most, held)
    return most


def pipeline_picture(
    stages: int, micro_batches: int, schedule: str, slowest: int
) -> draw.Picture:
    """The schedule, its bubble and the formula's, and what the stages keep."""
    seconds = [1.0] * (stages - 1) + [slowest / 100]
    orders = [
        pipeline_order(schedule, stages, stage, micro_batches)
        for stage in range(stages)
    ]
    rows = pipeline_times(orders, seconds)
    total = max(row[-1][3] for row in rows)
    bubble = 1 - 3 * micro_batches * sum(seconds) / (stages * total)
    formula = (stages - 1) / (micro_batches + stages - 1)
    title = (
        f"{schedule}: idle {bubble:.0%}, (K - 1) / (M + K - 1) = {formula:.0%}; "
        f"stages keep at most {', '.join(str(most_held(row)) for row in rows)}"
    )
    return draw.schedule(rows, title)


# -- shards ----------------------------------------------------------------------------

_STATES = {"SGD": 0, "SGD with momentum": 1, "Adam": 2}  # numbers a parameter
CARD_BYTES = 80 * 10**9  # of the shards explorer
_STAGES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def shards() -> Explorer:
    """Bytes of weights, gradients and optimizer state on each GPU.

    Taught in 15-shard-everything.
    """
    return Explorer(
        shards_picture,
        billions=_slider("billion parameters", 7, 1, 70),
        ranks=_slider("ranks", 8, 1, 64),
        stage=_choice("what is sharded", _STAGES),
        precision=_choice("precision", ("float32", "bfloat16 mixed")),
        optimizer=_choice("optimizer", tuple(_STATES), "Adam"),
    )


def shards_bytes(
    parameters: int, ranks: int, stage: str, precision: str, optimizer: str
) -> dict[str, int]:
    """Bytes that each rank holds between two steps: by arithmetic.

    "bfloat16 mixed" has weights and gradients in bfloat16, and a float32 copy of the
    weights that counts as optimizer state (Rajbhandari and others, ZeRO, 2019).
    Leaves out activations, buffers, and the weights that are gathered for a while.
    """
    mixed = precision != "float32"
    each = 2 if mixed else 4
    sizes = {
        "weights": each * parameters,
        "gradients": each * parameters,
        "optimizer state": 4 * parameters * (_STATES[optimizer] + mixed),
    }
    sharded = _STAGES.index(stage)
    for level, part in ((3, "weights"), (2, "gradients"), (1, "optimizer state")):
        if sharded >= level:
            sizes[part] = -(-sizes[part] // ranks)  # the last rank may hold less
    return sizes


def shards_picture(
    billions: int, ranks: int, stage: str, precision: str, optimizer: str
) -> draw.Picture:
    """One GPU's bytes beside those of DDP, and the line of an 80 GB card."""
    setting = (billions * 10**9, ranks)
    bars = {
        kind: shards_bytes(*setting, kind, precision, optimizer)
        for kind in dict.fromkeys(("DDP", stage))
    }
    here = sum(bars[stage].values())
    title = (
        f"{billions} billion parameters on {ranks} GPUs, {stage}: {here / 1e9:.1f} GB "
        f"each, {'fits' if here <= CARD_BYTES else 'does not fit'} into 80 GB"
    )
    return _against(title, bars, CARD_BYTES, "80 GB", lambda n: f"{n / 1e9:.1f} GB")


def _against(title: str, bars: dict, limit: int, card: str, words) -> draw.Picture:
    """Bars of named parts, one for each setting, and the line of a card's memory.

    Args:
        title: above it, and what a screen reader says.
        bars: name of a setting -> part -> bytes; all have the same parts.
        limit: bytes of the card.
        card: its name, below the line.
        words: of a number of bytes, where a part is wide enough.
    """
    picture = draw.Picture(draw.WIDEST, 84 + 44 * len(bars), title)
    picture.text(8, 20, title, 14, weight="bold")
    most = max(limit, *(sum(sizes.values()) for sizes in bars.values()))
    left, scale = 76, (draw.WIDEST - 88) / most
    bottom, edge = 40 + 44 * len(bars), left + limit * scale
    for row, (kind, sizes) in enumerate(bars.items()):
        x, y = left, 40 + 44 * row
        picture.text(8, y + 20, kind)
        for nbytes, fill in zip(sizes.values(), draw.COLOURS, strict=False):
            if nbytes:
                picture.box(x, y, nbytes * scale, 32, fill)
            if nbytes * scale > 60:
                middle = x + nbytes * scale / 2
                picture.text(middle, y + 21, words(nbytes), 12, "middle")
            x += nbytes * scale
    picture.line(edge, 32, edge, bottom)
    end = "end" if edge - left > 60 else "start"
    picture.text(edge - 4, bottom + 14, card, 12, end)
    for i, (part, fill) in enumerate(zip(sizes, draw.COLOURS, strict=False)):
        picture.box(left + 130 * i, bottom + 20, 14, 14, fill)
        picture.text(left + 130 * i + 20, bottom + 32, part, 12)
    return picture


# -- a budget of memory ----------------------------------------------------------------

_PRECISIONS = ("float32", "bfloat16 autocast")
_CHECKPOINTING = ("none", "best segments", "keep down", "every block")
_BUDGETS = {"256 MiB": 256 * MIB} | {
    name: card.total_memory for name, card in CARDS.items()
}


def budget() -> Explorer:
    """Bytes of a training step of transformer-like blocks, against a card's memory.

    Taught in 07-fit-a-bigger-model.
    """
    return Explorer(
        budget_picture,
        blocks=_slider("blocks", 12, 1, 96),
        width=_choice("width", (64, 128, 256, 512, 1024, 2048, 4096, 8192), 128),
        rows=_slider("rows of a batch", 1024, 256, 32768),
        precision=_choice("precision", _PRECISIONS),
        optimizer=_choice("optimizer", tuple(_STATES), "Adam"),
        checkpointing=_choice("checkpointing", _CHECKPOINTING),
        card=_choice("card", tuple(_BUDGETS)),
    )


def budget_bytes(
    width: int,
    blocks: int,
    rows: int,
    precision: str,
    optimizer: str,
    checkpointing: str,
) -> dict[str, int]:
    """Bytes of each part at the worst moment of a step: by arithmetic.

    A block is lesson 07's: `norm(x + down(gelu(up(x))))`, four times as wide inside.
    Gradients count in full, as from the second micro-batch on. Autocast keeps what
    `norm` reads and returns in float32, and for `backward()` a bfloat16 copy of each
    weight (not where it computes again: the block in turn makes its own). The best
    segments are those that need the least. Leaves out the first and the last layer,
    attention, and one weight's gradient.
    """
    parameters = blocks * (8 * width + 7) * width
    unit = 4 * rows * width  # a block's input in float32
    mixed = precision != "float32"
    each = (unit * 11 // 2 if mixed else 10 * unit) + 8 * rows  # norm: mean, deviation
    down = unit // 2 if mixed else unit
    segments = [k * unit + -(-blocks // k) * each for k in range(1, blocks + 1)]
    kept = {
        "none": blocks * each + unit,
        "best segments": min(segments),
        "keep down": blocks * unit + (blocks - 1) * down + each,
        "every block": blocks * unit + each,
    }[checkpointing]
    return {
        "weights": parameters * (6 if mixed and checkpointing == "none" else 4),
        "gradients": parameters * 4,
        "optimizer state": parameters * 4 * _STATES[optimizer],
        "activations": kept + 3 * unit,  # with three gradients of activations
    }


def budget_picture(
    width: int,
    blocks: int,
    rows: int,
    precision: str,
    optimizer: str,
    checkpointing: str,
    card: str,
) -> draw.Picture:
    """The step's parts in one bar above the plain step's, and the line of the card."""
    setting = (width, blocks, rows)
    bars = {
        "this": budget_bytes(*setting, precision, optimizer, checkpointing),
        "plain": budget_bytes(*setting, "float32", "Adam", "none"),
    }
    limit, here = _BUDGETS[card], sum(bars["this"].values())
    title = (
        f"{bars['plain']['gradients'] / 4e6:,.1f} million weights: {_bytes(here)}, "
        f"{'fits' if here <= limit else 'does not fit'} into {card}"
        f"{f' ({_bytes(limit)})' if card in CARDS else ''}"
    )
    return _against(title, bars, limit, card, _bytes)


def _bytes(nbytes: int) -> str:
    """A number of bytes as a budget names it: "62.3 MiB", "1.5 GiB"."""
    if nbytes >= GIB:
        return f"{nbytes / GIB:,.1f} GiB"
    return f"{nbytes / MIB:.1f} MiB"


# -- plans -----------------------------------------------------------------------------

_PLANNED = 4096  # tokens of a sequence
# memory of a machine's host: what NVIDIA's DGX of these cards have (datasheets)
HOST_BYTES = 2 * 10**12
OFFLOADED = 16  # bytes a parameter: weight, gradient and Adam's two numbers, float32
_AGAIN = {"all blocks": True, "every second block": 0.5, "no block": False}


def plan() -> Explorer:
    """A training run on many GPUs: does it fit, and how fast is it?

    Taught in 17-leave-one-machine.
    """
    return Explorer(
        plan_picture,
        machines=_slider("machines of 8 GPUs", 8, 1, 128),
        model=_choice("model", tuple(planning.MODELS), "8B"),
        strategy=_choice("strategy", planning.STRATEGIES, "fsdp"),
        card=_choice("card", tuple(planning.KERNELS), "H100"),
        batch=_slider("sequences on each GPU", 1, 1, 16),
        twice=_choice("computed twice", tuple(_AGAIN)),
    )


def plan_picture(
    machines: int, model: str, strategy: str, card: str, batch: int, twice: str
) -> draw.Picture:
    """The bytes of a GPU beside its memory, and the seconds of a step: by arithmetic.

    What is offloaded must fit into the memory of the hosts (`HOST_BYTES`), too.
    Where 8 GPUs share each matrix, they share 8 times as many sequences as well.
    """
    gpus = machines * planning.MACHINE
    together = planning.MACHINE if strategy.endswith("tensor 8") else 1
    run = dict(
        model=model, gpus=gpus, strategy=strategy, batch=batch * together,
        tokens=_PLANNED, checkpointing=_AGAIN[twice],
    )  # fmt: skip
    sizes, step = planning.bytes_per_gpu(**run), planning.step_seconds(card=card, **run)
    memory = find_card(card).total_memory
    fits = sizes.total <= memory
    title = (
        f"{model} on {gpus} {card}, {strategy}: {sizes.total / 1e9:.1f} GB each, "
        f"{'fits' if fits else 'does not fit'} into {memory / 1e9:.0f} GB"
    )
    hosts = ""
    if strategy == "fsdp offload":
        held = OFFLOADED * planning.parameters(model) / machines
        here = held <= HOST_BYTES
        fits = fits and here
        hosts = (
            f"{held / 1e12:.2f} TB in the host of each machine, "
            f"{'fits' if here else 'does not fit'} into {HOST_BYTES / 1e12:.0f} TB"
        )
    pace = (
        f"{'' if fits else 'if it did: '}{step.seconds:.2f} s a step, "
        f"{step.tokens_per_second:,.0f} tokens/s on each GPU, "
        f"{step.mfu:.0%} of its peak (planned)"
    )
    words = "; ".join(filter(None, (title, hosts, pace)))
    picture = draw.Picture(draw.WIDEST, 222, words)
    picture.text(8, 20, title, 14, weight="bold")
    if hosts:
        picture.text(8, 118, hosts, 14, weight="bold")
    most = max(memory, sizes.total)
    gigabytes = {part: f"{part} {size / 1e9:.1f}" for part, size in sizes.items()}
    _cut(picture, 32, sizes.values(), gigabytes.values(), draw.COLOURS, most)
    edge = 8 + (draw.WIDEST - 16) * memory / most
    picture.line(edge, 28, edge, 72)
    side = ("end", -4) if edge > draw.WIDEST / 2 else ("start", 4)
    picture.text(edge + side[1], 82, f"memory of the {card}", 12, side[0])
    picture.text(8, 136, pace, 14, weight="bold")
    spent = {
        "computing": step.compute,
        "update": step.update,
        "waiting for others": step.exposed,
    }
    seconds = [f"{part} {time:.3f} s" for part, time in spent.items()]
    fills = (draw.COLOURS[0], draw.COLOURS[2], draw.COLOURS[5])
    _cut(picture, 148, spent.values(), seconds, fills, step.seconds)
    return picture


def _cut(picture: draw.Picture, y: int, sizes, words, fills, whole: float) -> None:
    """A bar of one box for each size, and what they are below it."""
    x, scale = 8.0, (draw.WIDEST - 16) / whole
    apart = (draw.WIDEST - 16) / len(words)
    for i, (size, text, fill) in enumerate(zip(sizes, words, fills, strict=False)):
        picture.box(x, y, size * scale, 34, fill)
        x += size * scale
        picture.box(8 + apart * i, y + 56, 14, 14, fill)
        picture.text(28 + apart * i, y + 68, text, 12)
