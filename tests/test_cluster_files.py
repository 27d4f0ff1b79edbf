"""The files for clusters, as far as they can be run without one.

Stubs stand for what a cluster has: `srun` and `scontrol`, `ssh`, and the environment
that Kubeflow's trainer gives its containers. Behind them torchrun is real, on two
pretended nodes with two simulated GPUs each. Not shown: that a real Slurm, Kubernetes
or sshd takes them.
"""

import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy

from helpers.elastic import LOOPBACK
from helpers.processes import MARK, processes
from support.limits import JOB
from support.ports import free_port
from support.waiting import wait
from tests.launching import ROOT, environment, load

CLUSTER = ROOT / "notebooks/scripts/cluster"
SCRIPT = "notebooks/scripts/train_on_nodes.py"
SLURM, SSH, KUBEFLOW = (
    CLUSTER / name for name in ("slurm.sbatch", "ssh.sh", "kubeflow.yaml")
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform == "win32" or shutil.which("bash") is None, reason="needs bash"
    ),
]
# Only what is different here: all is on this machine, and no other may reach it.
HERE = {
    "PET_LOCAL_ADDR": "127.0.0.1", "PET_MONITOR_INTERVAL": "0.1",
    "GLOO_SOCKET_IFNAME": str(LOOPBACK),
    "OMP_NUM_THREADS": "1",
}  # fmt: skip

STEPS, GPUS = 40, 2  # GPUs of each pretended node


class Place:
    """A folder with `bin`, for stubs, and the environment of what is started there."""

    def __init__(self, folder: Path, environ: dict[str, str]):
        self.folder = folder
        self.bin = folder / "bin"
        path = f"{self.bin}{os.pathsep}{environ['PATH']}"
        self.environ = {**environ, **HERE, "PATH": path}
        self.bin.mkdir()
        simulated = f"{sys.executable} -m simgpu --gpus {GPUS}"
        self.stub("torchrun", f'exec {simulated} -m torch.distributed.run "$@"')

    def stub(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def start(self, *command, **more: str) -> subprocess.Popen:
        return subprocess.Popen(
            list(map(str, command)), cwd=ROOT, env={**self.environ, **more},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip


@pytest.fixture
def place(tmp_path: Path):
    """No process that was started here outlives the test."""
    with environment() as environ:
        yield Place(tmp_path, environ)
        assert not processes(environ[MARK])


def end_of(*started: subprocess.Popen) -> tuple[list[int], str]:
    """The statuses, and all that was said."""
    said = [text for each in started for text in each.communicate(timeout=JOB)]
    return [each.returncode for each in started], "".join(said)


@functools.cache
def one_process(steps: int) -> dict:
    """The checkpoint after so many steps of one process with the global batch."""
    script = load("train_on_nodes.py")
    model = script.make_model()
    optimizer = script.make_optimizer(model)
    for step in range(steps):
        batch = script.batch_of(step, rank=0, ranks=1)
        cross_entropy(model(batch["x"]), batch["y"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    both = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return {**both, "step": steps}


def check(folder: Path, said: str, begun_at: int = 0) -> None:
    """All GPUs of both nodes trained from that step on, to one process' weights."""
    places = re.findall(r"rank (\d): node (\d), GPU (\d)", said)
    expected = [(rank, *divmod(rank, GPUS)) for rank in range(2 * GPUS)]
    assert [tuple(map(int, place)) for place in places] == expected
    steps = re.findall(r"step (\d+): loss", said)
    assert list(map(int, steps)) == list(range(begun_at + 4, STEPS, 5))
    file = folder / "checkpoint.pt"
    found = torch.load(file, map_location="cpu", weights_only=True)
    assert found["step"] == STEPS
    for name, right in one_process(STEPS)["model"].items():
        torch.testing.assert_close(found["model"][name], right, rtol=0, atol=1e-4)


# -- all three -------------------------------------------------------------------------


@pytest.mark.parametrize("file", [SLURM, SSH], ids=lambda file: file.name)
def test_bash_can_read_it(file: Path):
    subprocess.run(["bash", "-n", file], check=True, timeout=JOB)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--shell=bash", file], check=True, timeout=JOB)


def test_all_run_the_same_script_with_the_same_options():
    folder = re.compile(r'"?--folder=[\w$/"]+')
    texts = [file.read_text(encoding="utf-8") for file in (SLURM, SSH)]
    texts.append(" ".join(trainer()["args"]))
    tails = [text[text.rindex(SCRIPT) :].splitlines()[0] for text in texts]
    said = [folder.sub("--folder", tail).removesuffix('"$@"').split() for tail in tails]
    assert said == [[SCRIPT, "--folder", "--steps=40"]] * 3
    for text in texts:
        assert {"--max-restarts=3", "--rdzv-backend=c10d"} <= set(text.split())


# -- Slurm -----------------------------------------------------------------------------


def directives() -> dict[str, str]:
    lines = SLURM.read_text(encoding="utf-8").splitlines()
    given = [line.split() for line in lines if line.startswith("#SBATCH")]
    assert all(len(words) == 2 for words in given)  # sbatch takes a comment for a name
    return dict(words[1].lstrip("-").partition("=")[::2] for words in given)


def submit(place: Place, **more: str) -> tuple[list[int], str]:
    """What sbatch does: a node runs the script, with these variables."""
    given = directives()
    place.stub("scontrol", '[ "$*" = "show hostnames node[1-2]" ] && '
               'printf "localhost\\nlocalhost\\n"')  # fmt: skip
    # on each node one task; the first failure ends all
    place.stub("srun", f"""
        [ "$1" = --kill-on-bad-exit=1 ] || exit 99
        [ "$SRUN_CPUS_PER_TASK" = {given["cpus-per-task"]} ] || exit 98
        shift
        trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
        for node in $(seq "$SLURM_JOB_NUM_NODES"); do SLURM_NODEID=$node "$@" & done
        for node in $(seq "$SLURM_JOB_NUM_NODES"); do wait -n || exit; done
    """)  # fmt: skip
    port = free_port() % 10_000  # 20000 and something: the file makes the rest of it
    settings = {
        "TORCHRUN": "torchrun", "FOLDER": str(place.folder / "job"),
        "SLURM_JOB_ID": str(port), "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": given["nodes"],
        "SLURM_CPUS_PER_TASK": given["cpus-per-task"],
        "SLURM_GPUS_ON_NODE": given["gpus-per-node"],
    }  # fmt: skip
    return end_of(place.start("bash", SLURM, **{**settings, **more}))


def test_the_directives_are_those_of_sbatch():
    given = directives()
    # a list of https://slurm.schedmd.com/sbatch.html
    known = {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "time"}
    assert set(given) == known | {"requeue", "open-mode", "gpus-per-node"}
    assert given["ntasks-per-node"] == "1" and given["open-mode"] == "append"
    text = SLURM.read_text(encoding="utf-8")
    assert text.rindex("#SBATCH") < text.index("set -euo")  # sbatch stops at a command


def test_slurm_trains_on_two_nodes(place: Place):
    statuses, said = submit(place)
    assert statuses == [0], said
    check(place.folder / "job", said)


@pytest.mark.parametrize("gpus, threads", [(8, 8), (128, 1)])
def test_slurm_ends_when_a_node_fails(place: Place, gpus: int, threads: int):
    """And gives each rank its share of the cores, or one."""
    place.stub("torchrun", f"""
        [ $OMP_NUM_THREADS = {threads} ] || exit 8
        [ $SLURM_NODEID = 2 ] && exit 7
        exec sleep 1000
    """)  # fmt: skip
    statuses, said = submit(place, SLURM_GPUS_ON_NODE=str(gpus))
    assert statuses == [7], said


# -- ssh -------------------------------------------------------------------------------


def ssh(place: Place, *hosts: str, **more: str) -> subprocess.Popen:
    place.stub(
        "ssh",
        f'echo "$1" >> {place.folder}/hosts; export HOST=${{1#*@}}; exec bash -c "$2"',
    )
    settings = {
        "SSH": "ssh", "TORCHRUN": "torchrun", "FOLDER": str(place.folder / "a job"),
        "PORT": str(free_port()),
    }  # fmt: skip
    return place.start("bash", SSH, *hosts, **{**settings, **more})


def test_ssh_goes_on_from_the_newest_checkpoint(place: Place):
    folder = place.folder / "a job"
    folder.mkdir()
    torch.save(one_process(35), folder / "checkpoint.pt")
    statuses, said = end_of(ssh(place, "me@localhost", "127.0.0.1"))
    assert statuses == [0], said
    hosts = (place.folder / "hosts").read_text().split()
    assert sorted(hosts) == ["127.0.0.1", "me@localhost"]
    check(folder, said, begun_at=35)


def test_ssh_stops_all_when_one_fails(place: Place):
    place.stub("torchrun", "[ $HOST = b ] && exit 7; exec sleep 1000")
    statuses, said = end_of(ssh(place, "a", "b", "c"))
    assert statuses == [7], said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_ssh_stops_all_when_it_is_stopped(place: Place, number: int):
    place.stub("torchrun", f"touch {place.folder}/$HOST; exec sleep 1000")
    before = signal.signal(number, signal.SIG_DFL)  # nohup's way is passed on, too
    running = ssh(place, "a", "b")
    signal.signal(number, before)
    wait(lambda: {"a", "b"} <= set(os.listdir(place.folder)), "both hosts")
    running.send_signal(number)
    assert end_of(running)[0] == [130]


def test_ssh_shows_what_it_would_run(place: Place):
    folder, hosts = "/shared/my job", ["host0", "me@host1"]
    settings = {"SSH": "echo", "FOLDER": folder}
    running = ssh(place, *hosts, **settings, PORT="29876", JOB="a-job")
    statuses, said = end_of(running)
    assert statuses == [0]
    for number, line in enumerate(sorted(said.splitlines())):
        words = shlex.split(line)
        assert words[:3] == [hosts[number], "cd", str(ROOT)]
        mine = {"--nnodes=2", "--nproc-per-node=gpu", f"--folder={folder}"}
        assert mine <= set(words)
        assert f"--rdzv-conf=is_host={1 - number}" in words
        assert {"--rdzv-endpoint=host0:29876", "--rdzv-id=a-job"} <= set(words)
        assert f"--local-addr=host{number}" in words


@pytest.mark.parametrize("hosts, what", [((), "name the hosts"), (("a",), "set it to")])
def test_ssh_says_what_it_lacks(place: Place, hosts, what):
    statuses, said = end_of(ssh(place, *hosts, FOLDER="" if hosts else "x"))
    assert statuses != [0] and what in said


# -- Kubeflow --------------------------------------------------------------------------

# The fields that the file uses, of the CRDs trainer.kubeflow.org/v1alpha1: Kubeflow
# Trainer 2.3.0, package kubeflow-trainer-api 2.3.0 (its models took the file whole).
# Copied by hand, so it finds a name that was misspelt here, one in the wrong place, a
# value of the wrong type and a field that is missing. It cannot find that Kubeflow has
# changed, nor a field that is right and not listed: then add it, after a look there.


def an_object(required: str = "", **properties) -> dict:
    return {
        "type": "object", "additionalProperties": False, "properties": properties,
        "required": required.split(),
    }  # fmt: skip


TEXT, COUNT = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 1}
TEXTS = {"type": "array", "items": TEXT}
LABELS = {"type": "object", "additionalProperties": TEXT}
METADATA = an_object(
    "name", labels=LABELS,
    name={"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63},
)  # fmt: skip
VERSION = {"const": "trainer.kubeflow.org/v1alpha1"}
TRAIN_JOB = an_object(
    "apiVersion kind metadata spec", apiVersion=VERSION, kind={"const": "TrainJob"},
    metadata=METADATA,
    spec=an_object(
        "runtimeRef",
        runtimeRef=an_object("name", apiGroup=TEXT, kind=TEXT, name=TEXT),
        trainer=an_object(
            image=TEXT, command=TEXTS, args=TEXTS, numNodes=COUNT,
            numProcPerNode=COUNT,
            env={"type": "array", "items": an_object("name", name=TEXT, value=TEXT)},
            resourcesPerNode=an_object(
                requests={"type": "object"}, limits={"type": "object"}
            ),
        ),
    ),
)  # fmt: skip
POD = an_object(
    "containers", restartPolicy={"enum": ["Never", "OnFailure", "Always"]},
    containers={"type": "array", "minItems": 1, "items": an_object(
        "name", name=TEXT, image=TEXT, workingDir=TEXT,
        securityContext=an_object(capabilities=an_object(add=TEXTS, drop=TEXTS)),
        volumeMounts={"type": "array", "items": an_object(
            "name mountPath", name=TEXT, mountPath=TEXT)},
    )},
    volumes={"type": "array", "items": an_object(
        "name", name=TEXT, persistentVolumeClaim=an_object("claimName", claimName=TEXT),
        emptyDir=an_object(medium={"const": "Memory"}),
    )},
)  # fmt: skip
RUNTIME = an_object(
    "apiVersion kind metadata spec", apiVersion=VERSION, metadata=METADATA,
    kind={"enum": ["TrainingRuntime", "ClusterTrainingRuntime"]},
    spec=an_object(
        "template",
        mlPolicy=an_object(
            numNodes=COUNT,
            torch=an_object(numProcPerNode={"type": ["integer", "string"]}),
        ),
        template=an_object(spec=an_object(
            failurePolicy=an_object(maxRestarts={"type": "integer", "minimum": 0}),
            replicatedJobs={"type": "array", "items": an_object(
                "name template", name=TEXT,
                template=an_object(metadata=an_object(labels=LABELS), spec=an_object(
                    "template", backoffLimit={"type": "integer", "minimum": 0},
                    template=an_object(spec=POD),
                )),
            )},
        )),
    ),
)  # fmt: skip


def documents() -> list[dict]:
    return list(yaml.safe_load_all(KUBEFLOW.read_text(encoding="utf-8")))


def trainer() -> dict:
    return documents()[-1]["spec"]["trainer"]


def test_the_yaml_has_the_fields_of_the_published_crds():
    claim, runtime, job = documents()
    jsonschema.validate(runtime, RUNTIME)
    jsonschema.validate(job, TRAIN_JOB)
    with pytest.raises(jsonschema.ValidationError):  # it does find a wrong name
        jsonschema.validate(job | {"spec": job["spec"] | {"trainers": {}}}, TRAIN_JOB)
    assert (claim["apiVersion"], claim["kind"]) == ("v1", "PersistentVolumeClaim")


def test_the_documents_fit_together():
    claim, runtime, job = documents()
    reference = job["spec"]["runtimeRef"]
    assert reference["kind"] == runtime["kind"]
    assert reference["name"] == runtime["metadata"]["name"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    step = "trainer.kubeflow.org/trainjob-ancestor-step"
    assert replicated["template"]["metadata"]["labels"] == {step: "trainer"}
    pod = replicated["template"]["spec"]["template"]["spec"]
    (container,), volumes = pod["containers"], pod["volumes"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in volumes}
    # the trainer changes the container of this name in the job of this name
    assert replicated["name"] == container["name"] == "node"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    (volume,) = [each for each in volumes if "persistentVolumeClaim" in each]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert f"--folder={mounts[volume['name']]}" in trainer()["args"][0].split()
    # so that RDMA may pin memory
    assert container["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"]}
    # a rank for each GPU of a pod
    limits = trainer()["resourcesPerNode"]["limits"]
    assert trainer()["numProcPerNode"] == limits["nvidia.com/gpu"] == 8
    # names that the trainer keeps for itself
    assert not any(each["name"].startswith("PET_") for each in trainer()["env"])


@pytest.mark.long
def test_the_container_trains_as_two_pods(place: Place):
    """With the variables of Kubeflow's torch plugin, and of this machine."""
    job, shared = trainer(), place.folder / "shared"
    shared.mkdir()
    of_both = {each["name"]: each["value"] for each in job["env"]} | {
        "PET_NNODES": str(job["numNodes"]),
        "PET_NPROC_PER_NODE": str(GPUS),  # fewer than the file's, for this machine
        "PET_MASTER_ADDR": "localhost",  # of the first pod: NAME-node-0-0.NAME
        "PET_MASTER_PORT": str(free_port()),
    }
    pods = []
    for rank in range(job["numNodes"]):
        variables = of_both | {"PET_NODE_RANK": str(rank)}
        # Kubernetes puts variables into command and args
        words = [
            re.sub(r"\$\((\w+)\)", lambda name, v=variables: v[name[1]], word)
            for word in [*job["command"], *job["args"]]
        ]
        words = [
            word.replace("--folder=/shared", f"--folder={shared}") for word in words
        ]
        pods.append(place.start(*words, **variables))
    statuses, said = end_of(*pods)
    assert statuses == [0, 0], said
    check(shared, said)
