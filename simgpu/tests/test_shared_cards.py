"""Processes that share a card share its memory, whoever has started them."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from test_ranks import FORKS, LINUX

import simgpu
from simgpu import Ranks, run_ranks
from simgpu import _ranks as ranks_module
from simgpu._device import ledger
from simgpu._device.cards import MIB
from simgpu._device.overhead import CONTEXT
from support import programs
from support.limits import SHORT

pytestmark = pytest.mark.skipif(os.name != "posix", reason="no locks on files there")
# Functions of this file are sent like those of a notebook: no rank imports pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
GIB = 2**30
SHOWN = re.compile(r"(Process \d+|this process) has (\S+ \S+) memory in use")


one = pytest.mark.simulated_gpus(2, memory="1GB")


# -- the ledger ------------------------------------------------------------------------
# Its processes need no PyTorch.

OTHER = """
import json, sys
from simgpu._device import ledger

card, machine, capacity = json.loads(sys.argv[1])
entry = ledger.join(tuple(machine)).entry(card)
for line in sys.stdin:
    print(entry.grow(int(line), capacity), flush=True)
"""


class Other:
    """Another process of the machine, that has what it is told to have."""

    def __init__(self, card=0, machine=("a machine",), capacity=1000, **environ):
        folder = Path(simgpu.__file__).parents[1]
        paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-c", OTHER, json.dumps([card, machine, capacity])],
            env={**os.environ, "PYTHONPATH": paths, **environ}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.pid = self.process.pid

    def grow(self, nbytes: int) -> bool:
        self.process.stdin.write(f"{nbytes}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline() == "True\n"

    def end(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.communicate(timeout=SHORT)


@pytest.fixture
def book(monkeypatch):
    monkeypatch.delenv(ledger.VARIABLE, raising=False)
    found = ledger.join(("a machine",))
    yield found
    found.leave()
    assert ledger.VARIABLE not in os.environ


def test_two_processes_never_have_more_than_the_card(book):
    mine, other = book.entry(0), Other()
    assert mine.grow(600, 1000) and mine.others() == {}
    assert not other.grow(401) and other.grow(400)
    assert not mine.grow(601, 1000) and mine.others() == {other.pid: 400}
    mine.shrink(100)
    assert other.grow(900) and mine.others() == {other.pid: 900}
    other.end()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_dead_process_had_is_free_and_its_row_is_used_again(book, number):
    mine, others = book.entry(0), [Other() for _ in range(2)]
    assert [other.grow(400) for other in others] == [True, True]
    assert not mine.grow(201, 1000)
    others[0].end(number)
    assert mine.grow(600, 1000) and mine.others() == {others[1].pid: 400}
    others[1].end(number)
    assert mine.others() == {}
    another = Other()
    assert another.grow(300) and mine.others() == {another.pid: 300}
    assert book._words[ledger._ROWS] == 2
    another.end()


@LINUX
def test_a_process_with_the_number_of_a_dead_one_is_another_one(book):
    mine, other = book.entry(0), Other()
    assert other.grow(400) and mine.others() == {other.pid: 400}
    book._words[ledger._WIDTH + ledger._START] -= 1  # as if of an earlier one
    assert mine.others() == {}
    other.end()


def test_cards_nodes_and_machines_are_apart(book, monkeypatch):
    mine = book.entry(0)
    others = [Other(1), Other(0, GROUP_RANK="1"), Other(0, **{ledger.VARIABLE: "/no"})]
    assert all(other.grow(1000) for other in others) and mine.others() == {}
    monkeypatch.setenv("GROUP_RANK", "1")
    assert book.entry(0).others() == {others[1].pid: 1000}
    for other in others:
        other.end()
    again = ledger.join(("another machine",))
    assert again.is_alone and not book.is_of(1)
    again.leave()


def test_a_process_that_stops_within_an_update_is_told_of(book, monkeypatch):
    holds = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, os, sys\n"
         "file = os.open(sys.argv[1], os.O_RDWR)\n"
         "fcntl.lockf(file, fcntl.LOCK_EX, 8)\n"
         "print(flush=True); sys.stdin.read()", os.environ[ledger.VARIABLE]],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    holds.stdout.readline()
    monkeypatch.setattr(ledger, "_SECONDS", 0.1)
    with pytest.raises(RuntimeError, match="has been stopped while it asked"):
        book.entry(0).grow(1, 1000)
    holds.kill()  # the lock goes with it
    holds.communicate(timeout=SHORT)
    assert book.entry(0).grow(1, 1000)


def test_memory_is_counted_where_the_program_has_closed_every_file(book):
    """As a daemon does."""
    mine, other = book.entry(0), Other()
    assert other.grow(400)
    os.close(book._file)
    assert not mine.grow(601, 1000) and mine.grow(600, 1000)
    assert not other.grow(401)
    other.end()


@FORKS
def test_a_forked_child_has_rows_of_its_own(book):
    mine, parent = book.entry(0), os.getpid()
    assert mine.grow(500, 1000)
    child = os.fork()
    if child == 0:
        book.after_fork()
        found = mine.grow(501, 1000), mine.grow(500, 1000), mine.others()
        mine.clear()
        os._exit(0 if found == (False, True, {parent: 500}) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert mine.grow(1000, 1000)


# -- beside another process ------------------------------------------------------------


@pytest.fixture
def beside(request):
    """Another process on card 1, and how this one has started its GPUs."""
    how = getattr(request, "param", {})
    simgpu.start(2, memory="1GB", **how)
    machine = (2, simgpu.CARDS["A100"].name, GIB)
    other = Other(1, machine, GIB)
    yield other
    other.end()
    simgpu.stop()


def take(mib: int, device: int = 1) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device=device)


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_the_cache_makes_room_where_others_have_the_rest(beside, settings):
    torch._C._accelerator_setAllocatorSettings(settings)
    take(300)
    assert beside.grow(700 * MIB) and torch.cuda.memory_reserved(1) == 300 * MIB
    assert not beside.grow(725 * MIB)
    x = take(320)
    # a segment that can grow does so by 20 MiB, and no other is given back
    assert torch.cuda.memory_stats(1)["num_alloc_retries"] == (not settings)
    assert torch.cuda.mem_get_info(1) == (4 * MIB, GIB) and x.is_cuda
    with pytest.raises(torch.OutOfMemoryError) as raised:
        take(6)  # which needs a segment of 20 MiB
    assert (
        "Tried to allocate 20.00 MiB. GPU 1 has a total capacity of 1024.00 MiB of "
        "which 4.00 MiB is free. "
    ) in str(raised.value)
    assert sorted(SHOWN.findall(str(raised.value))) == [
        (f"Process {beside.pid}", "700.00 MiB"), ("this process", "320.00 MiB")
    ]  # fmt: skip
    beside.end(signal.SIGKILL)
    assert take(600).is_cuda and take(1000, device=0).is_cuda


def test_a_fraction_is_of_the_whole_card_and_of_one_process(beside):
    assert beside.grow(600 * MIB)
    torch.cuda.set_per_process_memory_fraction(0.5, 1)
    with pytest.raises(torch.OutOfMemoryError, match=r"424.00 MiB is free.*512.00 MiB "
                       "allowed"):  # fmt: skip
        take(430)
    x = take(424)
    torch.cuda.set_per_process_memory_fraction(0.25, 1)
    del x
    assert take(420).is_cuda  # of the cache
    assert beside.grow(100 * MIB)
    torch.cuda.empty_cache()
    with pytest.raises(torch.OutOfMemoryError, match="924.00 MiB is free"):
        take(300)


@pytest.mark.parametrize("beside", [{"overhead": True}], indirect=True)
@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.cuda.set_device(1),
        lambda: torch.cuda.mem_get_info(1),
        lambda: torch.cuda.synchronize(1),
        lambda: torch.cuda.Stream(1),
        lambda: torch.zeros(1).cuda(1),
    ],
)
def test_a_card_without_room_for_a_context_cannot_be_used(beside, use):
    assert beside.grow(GIB - CONTEXT + 1)
    with pytest.raises(torch.AcceleratorError, match="CUDA error: out of memory\n"):
        use()
    assert torch.cuda.mem_get_info(0)[0] == GIB - CONTEXT
    assert beside.grow(GIB - CONTEXT - 20 * MIB)
    use()


# -- one process -----------------------------------------------------------------------


@one
def test_the_message_of_a_process_that_is_alone_is_as_it_was():
    torch.zeros(30 * MIB, device=1)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.zeros(GIB, device=1)
    assert (
        "GPU 1 has a total capacity of 1024.00 MiB of which 1024.00 MiB is free. "
        "Including non-PyTorch memory, this process has 0 bytes memory in use. Of the"
    ) in str(raised.value)


def test_the_children_of_this_process_are_told_of_its_cards_until_it_stops(monkeypatch):
    monkeypatch.delenv(ledger.VARIABLE, raising=False)
    simgpu.start(2)
    assert os.path.exists(os.environ[ledger.VARIABLE])
    simgpu.stop()
    assert ledger.VARIABLE not in os.environ


@pytest.mark.simulated_gpus(4, overhead=True)
def test_a_card_is_used_once_cuda_is_asked_for_something_there():
    pynvml = torch.cuda.pynvml
    pynvml.nvmlInit()

    def used() -> list[int]:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(4))
        return [pynvml.nvmlDeviceGetMemoryInfo(h).used // MIB for h in handles]

    context = CONTEXT // MIB
    torch.cuda.get_device_properties(0)
    assert used() == [0, 0, 0, 0]
    torch.cuda.set_device(1)
    assert used() == [0, context, 0, 0]
    with torch.cuda.device(2):
        pass
    torch.zeros(1, device=3)
    assert used() == [0, context, context, context + 2]
    assert torch.cuda.list_gpu_processes(0).endswith("no processes are running")
    assert f"{os.getpid()} uses" in torch.cuda.list_gpu_processes(3)
    free, total = torch.cuda.mem_get_info(0)  # which opens a context to ask
    assert total - free == CONTEXT and used()[0] == context


# -- ranks, all on GPU 0 ---------------------------------------------------------------


def on_gpu_0(size: int) -> tuple:
    """All ranks take as much of the first GPU of their node as they get."""
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    before = torch.cuda.mem_get_info(0)[0]
    dist.barrier()
    held = torch.empty(size, dtype=torch.uint8, device="cuda:0")
    dist.barrier()
    pynvml = torch.cuda.pynvml
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    free, total = torch.cuda.mem_get_info(0)
    assert torch.cuda.device_memory_used(0) == total - free
    dist.barrier()
    found = ""
    try:
        torch.empty(free + 1, dtype=torch.uint8, device="cuda:0")
    except torch.OutOfMemoryError as error:
        found = str(error)
    dist.barrier()
    own = [p.usedGpuMemory for p in running if p.pid == os.getpid()]
    return rank, os.getpid(), before - free, own, len(running), found, held.nbytes


def test_ranks_on_one_gpu_share_its_bytes():
    found = run_ranks(on_gpu_0, 4, 100 * MIB, memory="512MB", nodes=2)
    for rank, pid, fell, own, processes, message, _ in found:
        assert fell == 200 * MIB and processes == 2  # those of its own node
        assert own == [100 * MIB]
        other = next(p for r, p, *_ in found if r != rank and r // 2 == rank // 2)
        names = [(f"Process {other}", "100.00 MiB"), ("this process", "100.00 MiB")]
        assert SHOWN.findall(message) == (names if other < pid else names[::-1])
        assert "capacity of 512.00 MiB of which 312.00 MiB is free" in message


def contexts() -> list[int]:
    """What the ranks have on GPU 0, where the last one only gives it the tensors."""
    import torch.distributed as dist

    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    x = torch.ones(MIB, device="cuda")
    dist.all_reduce(x)
    if rank == 1:
        x.to("cuda:0")
    dist.barrier()
    used = torch.cuda.device_memory_used(0), torch.cuda.device_memory_used(1)
    dist.barrier()
    return used


def test_a_rank_that_uses_gpu_0_by_mistake_has_a_context_there():
    """pytorch issue 49481."""
    (used, of_1), other = run_ranks(contexts, 2)
    assert (used, of_1) == other
    assert used - of_1 == CONTEXT + 20 * MIB


def without_room_for_nccl() -> str:
    import torch.distributed as dist

    from simgpu._device import overhead

    overhead.NCCL_BUFFERS = 2**40
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["RANK"]))
    try:
        dist.all_reduce(torch.ones(1, device="cuda"))
    except dist.DistBackendError as error:
        return str(error)


def test_nccl_names_a_card_that_is_full():
    found = run_ranks(without_room_for_nccl, 2)
    assert all(text.endswith("Cuda failure 2 'out of memory'") for text in found)


held = []


def take_on_gpu_0(size: int) -> None:
    import torch

    if os.environ["RANK"] == "1":
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda:0"))


def free_on_both() -> list[int]:
    import torch

    return [torch.cuda.mem_get_info(i)[0] // 2**20 for i in range(2)]


@one
def test_ranks_of_a_notebook_share_their_cards_and_no_others():
    torch.empty(800 * MIB, dtype=torch.uint8, device="cuda:0")  # of the notebook
    for _ in range(2):
        with Ranks(2, memory="512MB") as ranks:
            assert ranks.run(free_on_both) == [[512, 512]] * 2
            ranks.run(take_on_gpu_0, 300 * MIB)
            assert ranks.run(free_on_both) == [[212, 512]] * 2
    ranks_module.close()


# -- programs --------------------------------------------------------------------------

ALL_ON_0 = """
import os, sys, torch
import torch.distributed as dist
dist.init_process_group("nccl")
rank = dist.get_rank()
x = torch.empty(300 * 2**20, dtype=torch.uint8, device="cuda:0")
dist.barrier(device_ids=[rank])
free = [torch.cuda.mem_get_info(i)[0] // 2**20 for i in (0, 1)]
line = " ".join(map(str, [rank, *free]))
print(line + chr(10), end="")  # torchrun's ranks have no buffer: in one piece
dist.barrier(device_ids=[rank])
"""


def lines(done) -> list[str]:
    assert done.status == 0, done.stderr
    return sorted(done.stdout.splitlines())


def test_ranks_of_a_launcher_that_is_not_ours_meet_on_the_card(tmp_path):
    script = tmp_path / "all_on_0.py"
    script.write_text(ALL_ON_0)
    done = programs.in_ranks(tmp_path, 2, "--memory", "1GB", script)
    assert lines(done) == ["0 424 1024", "1 424 1024"]


def test_visible_devices_name_cards_of_the_machine(tmp_path):
    """cuda:0 of rank 1 is the card that rank 0 calls cuda:1."""
    script = tmp_path / "hidden.py"
    hidden = "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = ['0,1', '1,0']["
    hidden += "int(os.environ['RANK'])]\n"
    script.write_text(hidden + ALL_ON_0.replace("device_ids=[rank]", "device_ids=[0]"))
    done = programs.in_ranks(tmp_path, 2, "--memory", "1GB", script)
    assert lines(done) == ["0 724 724", "1 724 724"]


def test_ranks_behind_the_command_share_the_cards_of_their_node(tmp_path):
    script = tmp_path / "all_on_0.py"
    script.write_text(ALL_ON_0.replace("[rank]", "[int(os.environ['LOCAL_RANK'])]"))
    done = programs.simulated(
        tmp_path, "--gpus", 2, "--memory", "1GB", "--nodes", 2, "torchrun",
        "--standalone", "--nproc-per-node", 4, script,
    )  # fmt: skip
    assert lines(done) == [f"{rank} 424 1024" for rank in range(4)]


SPAWNS = """
import os, signal, torch
import torch.multiprocessing as mp

def free():
    return torch.cuda.mem_get_info(0)[0] // 2**20

def work(get, put):
    x = torch.ones(100 * 2**20, dtype=torch.uint8, device="cuda:0")
    put.put("has it")
    received = get.get(timeout=SHORT)
    put.put((free(), torch.cuda.memory_reserved(0), received.nbytes))
    get.get(timeout=SHORT)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    torch.cuda.set_device(0)
    context = mp.get_context("spawn")
    get, put = context.Queue(), context.Queue()
    process = context.Process(target=work, args=(get, put))
    process.start()
    assert put.get(timeout=SHORT) == "has it"
    sent = torch.ones(50 * 2**20, dtype=torch.uint8, device="cuda:0")
    get.put(sent)
    print(free(), *put.get(timeout=SHORT))
    assert str(process.pid) in torch.cuda.list_gpu_processes(0)
    get.put("end")
    process.join(SHORT)
    print(process.exitcode, free())
"""


def test_a_spawned_process_shares_the_card_until_it_ends(tmp_path):
    """And what it receives counts once, for the process that has sent it."""
    script = tmp_path / "spawns.py"
    script.write_text(SPAWNS.replace("SHORT", str(SHORT)))
    done = programs.simulated(tmp_path, "--gpus", 1, "--memory", "512MB", script)
    assert done.status == 0, done.stderr
    free = 512 - 100 - 50
    told = f"{free} {free} {100 * MIB} {50 * MIB}"
    assert done.stdout.splitlines() == [told, f"-9 {512 - 50}"]


PLAIN = """
import torch, simgpu
simgpu.is_running() or simgpu.start(2, memory="1GB")
x = torch.empty(100 * 2**20, dtype=torch.uint8, device="cuda")
print(torch.cuda.mem_get_info()[0] // 2**20)
"""


@one
def test_a_child_of_a_plain_program_has_its_cards_and_a_command_its_own(tmp_path):
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    x = torch.empty(200 * MIB, dtype=torch.uint8, device="cuda")
    assert lines(programs.in_new_python(tmp_path, script)) == ["724"]
    done = programs.simulated(tmp_path, "--gpus", 2, "--memory", "1GB", script)
    assert lines(done) == ["924"] and x.is_cuda
    assert torch.cuda.mem_get_info()[0] == 824 * MIB


FULL = """
import resource, torch
addresses = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (addresses + 2**31, addresses + 2**31))
x = torch.ones(2**18, device="cuda")
for function in (lambda: torch.empty(2**34, dtype=torch.uint8, device="cuda"),
                 lambda: x.repeat(2**14), lambda: x.repeat(2**18),
                 lambda: torch.empty(2**34, dtype=torch.uint8)):
    try:
        function()
    except RuntimeError as error:
        print(type(error).__name__, str(error).replace("\\n", " "))
"""


@LINUX
def test_a_full_card_is_named_before_a_machine_without_the_memory(tmp_path):
    script = tmp_path / "full.py"
    script.write_text(FULL)
    done = programs.simulated(tmp_path, "--gpus", 1, script)
    assert done.status == 0, done.stderr
    small = "RuntimeError this machine does not have the memory for 16.00 GiB of values"
    starts = [small, small, "OutOfMemoryError CUDA out of memory.", "RuntimeError [enf"]
    for line, start in zip(done.stdout.splitlines(), starts, strict=True):
        assert line.startswith(start)
