"""Jobs of PyTorch's own elastic engine: started, broken on purpose, watched, ended.

A `Job` starts agents (`torchrun` processes), one for each pretended machine, on this
one. Agents and workers are real; what happens to them is real. Their GPUs may be
simulated. `Job.log` is what the ranks have noted, and `runs_of` cuts it where they
started anew. `Job.reach` waits for a step. Nothing outlives a job: not when it is
closed, and not when the notebook is killed (a process of its own watches for that).
Leaves out: more than one real machine (25-leave-one-machine has network namespaces).

Taught in 24-survive-failures.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import simgpu
from helpers.job_log import meetings, noted, runs_of
from helpers.processes import (
    MARK,
    JobError,
    children,
    command_line,
    end,
    environment,
    free_port,
    kill,
)

LOOPBACK = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)  # its name, if known

# quick; PyTorch's own are 30 s for the last call, and 3 times 5 s until one is missed.
# Ten times 1 s: an agent that a busy machine holds up for 3 s must not count as dead.
# It would never learn of it, and train on by itself beside the others.
CONF = {"last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 10}
# ends when the notebook closes the pipe, or is gone while another holds it open
_GUARD = """
import os, select, shutil, sys
parent, job, *folders = sys.argv[1:]
while os.getppid() == int(parent):
    if select.select([sys.stdin], [], [], 1)[0]:
        break
from helpers.processes import end
end(job)
for folder in folders:
    shutil.rmtree(folder, ignore_errors=True)
"""


class Node:
    """One agent and its workers: what would be one machine."""

    def __init__(self, job: "Job", number: int, agent: subprocess.Popen):
        self.job, self.number, self.agent = job, number, agent
        self.output = job.folder / f"agent-{number}.txt"
        self._pid = None

    @property
    def pid(self) -> int | None:
        """The process that is torchrun; None if it has not begun.

        On simulated GPUs, `Job` starts another command, which starts it: the only child
        whose command line is not that command's own.
        """
        if self._pid is None:
            found = [self.agent.pid]
            if self.job.gpus:
                own = command_line(self.agent.pid)
                found = [
                    child.pid
                    for child in children(self.agent.pid)
                    if command_line(child.pid) not in ([], own)
                ]
            self._pid = next(iter(found), None)
        return self._pid

    @property
    def workers(self) -> list[int]:
        """The processes of its ranks, in order of their number on this node."""
        with_rank = []
        for child in children(self.pid) if self.pid else []:
            rank = environment(child).get("LOCAL_RANK")
            if rank is not None:
                with_rank.append((int(rank), child.pid))
        return [pid for _, pid in sorted(with_rank)]

    @property
    def words(self) -> str:
        """What its agent and workers have printed."""
        return self.output.read_text(errors="replace")

    @property
    def status(self) -> int | None:
        """The agent's exit status; None while it runs, negative for a signal."""
        status = self.agent.poll()
        if status is not None and self.job.gpus and status > 128:
            return 128 - status  # as a shell says that its child was killed
        return status

    def kill_worker(self, which: int = 0) -> None:
        """Kill one of its ranks, as the system does that runs out of memory."""
        self._signal("kill worker", which, signal.SIGKILL)

    def stop_worker(self, which: int = 0) -> None:
        """Make one of its ranks hang: it is there, and does nothing."""
        self._signal("stop worker", which, signal.SIGSTOP)

    def _signal(self, event: str, which: int, number: int) -> None:
        workers = self.workers
        if which >= len(workers):
            raise JobError(f"node {self.number} has {len(workers)} workers now")
        self.job.mark(event, self.number)
        os.kill(workers[which], number)

    def kill_agent(self) -> None:
        """Kill the agent alone. Its workers live on."""
        self.job.mark("kill agent", self.number)
        kill(self.pid)
        self.agent.wait(600)

    def kill(self) -> None:
        """Kill agent and workers: the machine is gone."""
        self.job.mark("kill node", self.number)
        for pid in (self.pid, *self.workers):
            kill(pid)
        self.agent.wait(600)


class Job:
    """An elastic job on this machine.

    Args:
        script: what the ranks run, and its arguments; "{folder}" in them is replaced.
        nodes: how many agents: "2", or from and to: "1:3".
        ranks: of each node.
        restarts: how often the ranks may be started anew (`--max-restarts`; torchrun's
            own default is 0).
        conf: of the rendezvous, over those that make it quick here (`CONF`).
        options: more of torchrun's, such as "--shutdown-timeout=5".
        gpus: simulated GPUs of each node; 0 if the ranks use none. With some, all
            `Ranks` end, and the process that forks them, because a job needs memory.
        folder: of a job before, to go on from its checkpoints; None makes a new one.

    Attributes:
        folder: temporary, if none was given. Has the log, the checkpoints, what the
            agents print, and the temporary files of all.
        nodes: those that were started, dead ones too.

    Raises:
        ValueError: for a number of nodes that torchrun cannot read.
    """

    def __init__(self, *script: str, nodes: str | int = 1, ranks: int = 1,
                 restarts: int = 3, conf: dict | None = None, options=(),
                 gpus: int = 0, folder: Path | None = None):  # fmt: skip
        match = re.fullmatch("([1-9][0-9]*)(?::([1-9][0-9]*))?", str(nodes))
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f'nodes={nodes!r}; write a number, or "1:3"')
        self._temporary = None
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="job-")
            folder = self._temporary.name
        self.folder = Path(folder)
        self.name = uuid.uuid4().hex
        self.port = free_port()
        self.nodes: list[Node] = []
        self.marks: list[dict] = []
        self.conf = CONF | (conf or {})
        self.gpus = gpus
        self.launcher = [sys.executable, "-m", "torch.distributed.run"]
        if gpus:
            self.launcher[1:1] = ["-m", "simgpu", f"--gpus={gpus}"]
            simgpu.close_ranks()
        self.command = [
            *self.launcher, f"--nnodes={nodes}", f"--nproc-per-node={ranks}",
            f"--max-restarts={restarts}", "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self.port}", f"--rdzv-id={self.name}",
            "--local-addr=127.0.0.1", "--monitor-interval=0.1", *options,
            *(word.replace("{folder}", str(self.folder)) for word in script),
        ]  # fmt: skip
        self.environ = {
            **os.environ, MARK: self.name, "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.folder),  # torchrun leaves a folder there
            # or a restarted rank may find the address of the one before it
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }  # fmt: skip
        if gpus:
            # also where there are real ones
            self.environ |= {"HELPERS_GPUS": "simulated", "SIMGPU": "on"}
        if LOOPBACK:
            for backend in ("GLOO", "TP"):
                self.environ[f"{backend}_SOCKET_IFNAME"] = LOOPBACK
        self._guard = self._start_guard()

    def _start_guard(self) -> subprocess.Popen:
        """A process that ends the job when this one is gone."""
        environ = {**os.environ, "PYTHONPATH": _course_first()}
        environ.pop(MARK, None)  # it must outlive a job that has started this one
        words = [str(os.getpid()), self.name]
        if self._temporary is not None:
            words.append(self._temporary.name)
        return subprocess.Popen(
            [sys.executable, "-c", _GUARD, *words],
            stdin=subprocess.PIPE, start_new_session=True, env=environ,
        )  # fmt: skip

    # -- nodes -----------------------------------------------------------------------

    def add(self) -> Node:
        """Start one more agent; the first hosts the rendezvous."""
        number = len(self.nodes)
        # else whoever binds the port first is host, and the job ends with that node
        command = self._command(is_host=number == 0)
        self.mark("add node", number)
        with (self.folder / f"agent-{number}.txt").open("w") as output:
            agent = subprocess.Popen(
                command, env=self.environ, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.nodes.append(Node(self, number, agent))
        return self.nodes[-1]

    def _command(self, is_host: bool) -> list[str]:
        conf = self.conf | {"is_host": int(is_host)}
        words = ",".join(f"{name}={value}" for name, value in conf.items())
        first = len(self.launcher)
        return [
            *self.launcher, f"--rdzv-conf={words}", *self.command[first:]
        ]  # fmt: skip

    def __str__(self) -> str:
        """The command of its first agent, as a shell would take it, in short lines."""
        words = ["torchrun", *self._command(is_host=True)[len(self.launcher) :]]
        secret = {
            str(self.folder): "FOLDER", self.name: "NAME", f":{self.port}": ":PORT"
        }  # fmt: skip
        lines = [""]
        for word in words:
            for real, shown in secret.items():
                word = word.replace(real, shown)
            if len(lines[-1]) + len(word) > 84:
                lines[-1] += " \\"
                lines.append("   ")
            lines[-1] += f" {word}"
        return "\n".join(lines)[1:]

    def go(self, step: int) -> None:
        """Let the ranks do a step before which they wait (`--hold`)."""
        (self.folder / f"go-{step}").touch()

    def mark(self, event: str, node: int) -> None:
        """Note what was done to the job, beside what its ranks note."""
        self.marks.append({"time": time.time(), "event": event, "node": node})

    # -- what happened -----------------------------------------------------------------

    @property
    def log(self) -> list[dict]:
        """What the ranks have noted and what was done to them, by time."""
        entries = [*noted(self.folder), *self.marks]
        return sorted(entries, key=lambda entry: entry["time"])

    @property
    def rows_that_count(self) -> dict[int, list[int]]:
        """Step -> the samples that made the final weights, of all ranks, sorted.

        A step that was lost is done again, and then only the second time counts.
        """
        steps: dict[int, list[int]] = {}
        for entry in self.log:
            if entry["event"] == "loaded":
                kept = [step for step in steps if step < entry["step"]]
                steps = {step: steps[step] for step in kept}
            elif entry["event"] == "step":
                steps.setdefault(entry["step"], []).extend(entry["rows"])
        return {step: sorted(rows) for step, rows in steps.items()}

    @property
    def steps_again(self) -> list[int]:
        """For each start but the first: how many steps were done for nothing."""
        runs = runs_of(self.log)
        return [a.end - b.first for a, b in zip(runs, runs[1:], strict=False)]

    def recoveries(self) -> list[tuple[str, float, float, float]]:
        """For each start but the first: what was done to the job, and three times.

        Seconds until the nodes have met, then until all ranks have loaded, then until
        the steps that were lost are done. The agents must say what they do
        (LOGLEVEL=INFO).
        """
        runs, found = runs_of(self.log), []
        met = [at for node in self.nodes for at in meetings(node.words)]
        for before, after in zip(runs, runs[1:], strict=False):
            if not before.marks:  # a node came late, and the ranks started again
                continue
            ends = [before.marks[0]["time"]]
            for event, step in (("loaded", None), ("step", before.end - 1)):
                times = [
                    e["time"]
                    for e in self.log
                    if e["event"] == event and e["pid"] in after.pids
                    and step in (None, e["step"])
                ]  # fmt: skip
                ends.append(max(times, default=ends[-1]))
            ends.insert(1, max(t for t in met if t < ends[1]))
            parts = [b - a for a, b in zip(ends, ends[1:], strict=False)]
            found.append((before.marks[0]["event"], *parts))
        return found

    def reach(self, step: int, ranks: int = 1, seconds: float = 600) -> None:
        """Wait until so many ranks together have done a step, and all noted it.

        Raises:
            JobError: if the job ends first, or the seconds are over.
        """

        def done() -> bool:
            entries = [
                e for e in self.log if e["event"] == "step" and e["step"] == step
            ]
            return len({e["rank"] for e in entries if e["ranks"] == ranks}) == ranks

        self.wait(done, f"step {step} by {ranks} ranks", seconds)

    def wait(self, condition, what: str, seconds: float = 600) -> None:
        """Wait until `condition()`; `what` is for the error.

        Raises:
            JobError: if the job ends first, or the seconds are over.
        """
        end = time.monotonic() + seconds
        while True:
            over = all(node.status is not None for node in self.nodes)
            for node in self.nodes:
                _ = node.pid  # cannot be asked when it has ended
            if condition():
                return
            if not self.nodes:
                raise JobError(f"no node was added, so there will be no {what}")
            if over or time.monotonic() > end:
                why = "the job has ended" if over else f"{seconds:.0f} s are over"
                raise JobError(
                    f"{why} before {what}. Last words:\n{self._last_words()}"
                )
            time.sleep(0.02)

    def finish(self, seconds: float = 600) -> list[int | None]:
        """Wait for all agents; their exit statuses, in order of the nodes.

        Raises:
            JobError: if one still runs when the seconds are over.
        """

        def over() -> bool:
            return all(node.status is not None for node in self.nodes)

        self.wait(over, "its end", seconds)
        return [node.status for node in self.nodes]

    def _last_words(self) -> str:
        return "\n".join(
            f"[node {node.number}] {line}"
            for node in self.nodes
            for line in node.words.splitlines()[-20:]
        )

    # -- the end -----------------------------------------------------------------------

    def close(self) -> None:
        """End every process of the job and remove its folder."""
        try:
            for node in self.nodes:
                node.agent.kill()
            for node in self.nodes:
                node.agent.wait()
        finally:
            try:
                end(self.name)
                self._guard.kill()  # nothing is left to guard
                self._guard.wait()
                self._guard.stdin.close()
            finally:
                if self._temporary is not None:
                    self._temporary.cleanup()

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()


def _course_first() -> str:
    """A PYTHONPATH on which `helpers` is found, for a process outside the notebook."""
    course = str(Path(__file__).parents[1])
    return os.pathsep.join(filter(None, (course, os.environ.get("PYTHONPATH"))))
