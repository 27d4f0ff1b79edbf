"""The files for clusters, as far as they can be run without one.

Stubs stand for what a cluster has: `srun` and `scontrol`, `ssh`, and the environment
that Kubeflow's trainer gives its containers. Behind them torchrun and training are
real: two pretended nodes on this machine's loopback. Not shown: that a real Slurm,
Kubernetes or sshd takes them.
"""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import psutil
import pytest
import torch
import yaml

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = ROOT / "notebooks/scripts/cluster"
SCRIPT = "notebooks/scripts/train_elastic.py"
SLURM, SSH, KUBEFLOW = (
    CLUSTER / name for name in ("slurm.sbatch", "ssh.sh", "kubeflow.yaml")
)
pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or shutil.which("bash") is None, reason="needs bash"
)
# Only what is different here: all is on this machine, and no other may reach it.
HERE = {
    "PET_LOCAL_ADDR": "127.0.0.1", "PET_MONITOR_INTERVAL": "0.1",
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip

SLEEP = f"exec {sys.executable} -c 'import time; time.sleep(1000)'"


@pytest.fixture
def place(tmp_path: Path):
    """A folder with `bin`, for stubs; no process that knows it outlives the test."""
    (tmp_path / "bin").mkdir()
    stub(tmp_path, "torchrun", f'exec {sys.executable} -m torch.distributed.run "$@"')
    yield tmp_path
    left = processes_of(tmp_path)
    for process in left:
        process.kill()
    assert not left


def processes_of(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(folder) in word for word in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def stub(place: Path, name: str, text: str) -> None:
    path = place / "bin" / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def environ(place: Path, **more: str) -> dict[str, str]:
    path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **HERE, "PATH": path, **more}


def run(*command, place: Path, **more: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        list(map(str, command)), cwd=ROOT, env=environ(place, **more),
        capture_output=True, text=True, timeout=150,
    )  # fmt: skip


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return door.getsockname()[1]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "weights.pt", weights_only=True)


def ranks_of(folder: Path) -> set[tuple[int, int]]:
    """(rank, ranks) of all that have trained."""
    lines = (folder / "log.jsonl").read_text()
    found = re.findall(r'"event": "step", "rank": (\d+), "ranks": (\d+)', lines)
    return {(int(rank), int(ranks)) for rank, ranks in found}


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Path:
    """The folder of two ranks under one torchrun."""
    folder = tmp_path_factory.mktemp("reference")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    command += [SCRIPT, f"--folder={folder}", "--steps=40"]
    subprocess.run(
        command, cwd=ROOT, env={**os.environ, **HERE}, check=True, timeout=150
    )
    return folder


def check(folder: Path, reference: Path, begun_at: int = 0) -> None:
    """Two ranks trained from that step on, to the weights of the reference."""
    assert ranks_of(folder) == {(0, 2), (1, 2)}
    log = (folder / "log.jsonl").read_text()
    (step,) = re.findall(r'"event": "loaded", "rank": 0,.*"step": (\d+)', log)
    assert int(step) == begun_at
    expected = weights(reference)
    assert all(torch.equal(weights(folder)[name], expected[name]) for name in expected)


# -- all three -------------------------------------------------------------------------


@pytest.mark.parametrize("file", [SLURM, SSH], ids=lambda file: file.name)
def test_bash_can_read_it(file: Path):
    subprocess.run(["bash", "-n", file], check=True, timeout=20)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--shell=bash", file], check=True, timeout=60)


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


def submit(place: Path, *options: str) -> subprocess.CompletedProcess:
    """What sbatch does: a node runs the script, with these variables."""
    stub(place, "scontrol", '[ "$*" = "show hostnames node[1-2]" ] && '
         'printf "localhost\\nlocalhost\\n"')  # fmt: skip
    # on each node one task; the first failure ends all
    stub(place, "srun", """
        [ "$1" = --kill-on-bad-exit=1 ] || exit 99
        shift
        trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
        for node in $(seq "$SLURM_JOB_NUM_NODES"); do SLURM_NODEID=$node "$@" & done
        for node in $(seq "$SLURM_JOB_NUM_NODES"); do wait -n || exit; done
    """)  # fmt: skip
    given = directives()
    port = free_port() % 10_000  # 20000 and something: the file makes the rest of it
    return run(
        "bash", SLURM, *options, place=place, TORCHRUN="torchrun",
        SLURM_JOB_ID=str(port), SLURM_JOB_NODELIST="node[1-2]",
        SLURM_JOB_NUM_NODES=given["nodes"], FOLDER=str(place / "job"),
        SLURM_CPUS_PER_TASK=given["cpus-per-task"],
    )  # fmt: skip


def test_the_directives_are_those_of_sbatch():
    given = directives()
    # a list of https://slurm.schedmd.com/sbatch.html
    known = {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "time"}
    assert set(given) == known | {"requeue", "open-mode"}
    assert given["ntasks-per-node"] == "1" and given["open-mode"] == "append"
    text = SLURM.read_text(encoding="utf-8")
    assert text.rindex("#SBATCH") < text.index("set -euo")  # sbatch stops at a command


def test_slurm_trains_on_two_nodes(place: Path, reference: Path):
    done = submit(place)
    assert done.returncode == 0, done.stderr
    check(place / "job", reference)


def test_slurm_ends_when_a_node_fails(place: Path):
    stub(place, "torchrun", f"[ $SLURM_NODEID = 2 ] && exit 7; {SLEEP} {place}")
    assert submit(place).returncode == 7


# -- ssh -------------------------------------------------------------------------------


def ssh(place: Path, *hosts: str, **more: str) -> subprocess.Popen:
    stub(place, "ssh", f'echo "$1" >> {place}/hosts; export HOST=$1; exec bash -c "$2"')
    settings = {"SSH": "ssh", "TORCHRUN": "torchrun", "FOLDER": str(place / "a job")}
    return subprocess.Popen(
        ["bash", SSH, *hosts], cwd=ROOT,
        env=environ(place, PORT=str(free_port()), **{**settings, **more}),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_ssh_goes_on_from_the_newest_checkpoint(place: Path, reference: Path):
    (place / "a job").mkdir()
    shutil.copy(reference / "step-000035.pt", place / "a job")
    running = ssh(place, "localhost", "127.0.0.1")
    _, err = running.communicate(timeout=150)
    assert running.returncode == 0, err
    assert sorted((place / "hosts").read_text().split()) == ["127.0.0.1", "localhost"]
    check(place / "a job", reference, begun_at=35)


def test_ssh_stops_all_when_one_fails(place: Path):
    stub(place, "torchrun", f"[ $HOST = b ] && exit 7; {SLEEP} {place}")
    running = ssh(place, "a", "b", "c")
    running.communicate(timeout=30)
    assert running.returncode == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_ssh_stops_all_when_it_is_stopped(place: Path, number: int):
    stub(place, "torchrun", f"touch {place}/$HOST; {SLEEP} {place}")
    running = ssh(place, "a", "b")
    end = time.monotonic() + 30
    while not {"a", "b"} <= set(os.listdir(place)):
        assert time.monotonic() < end
        time.sleep(0.02)
    running.send_signal(number)
    running.communicate(timeout=30)
    assert running.returncode == 130


def test_ssh_shows_what_it_would_run(place: Path):
    folder = "/shared/my job"
    running = ssh(place, "host0", "host1", SSH="echo", FOLDER=folder, RANKS="8")
    out, _ = running.communicate(timeout=30)
    assert running.returncode == 0
    for number, line in enumerate(sorted(out.splitlines())):
        words = shlex.split(line)
        assert words[:3] == [f"host{number}", "cd", str(ROOT)]
        assert {"--nnodes=2", "--nproc-per-node=8", f"--folder={folder}"} <= set(words)
        assert f"--rdzv-conf=is_host={1 - number}" in words


@pytest.mark.parametrize("hosts, what", [((), "name the hosts"), (("a",), "set it to")])
def test_ssh_says_what_it_lacks(place: Path, hosts, what):
    running = ssh(place, *hosts, FOLDER="" if hosts else "x")
    _, err = running.communicate(timeout=30)
    assert running.returncode != 0 and what in err


# -- Kubeflow --------------------------------------------------------------------------

# The fields that the file uses, of the CRDs trainer.kubeflow.org/v1alpha1: Kubeflow
# Trainer 2.3.0, package kubeflow-trainer-api 2.3.0 (its models took the file whole).


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
        volumeMounts={"type": "array", "items": an_object(
            "name mountPath", name=TEXT, mountPath=TEXT)},
    )},
    volumes={"type": "array", "items": an_object(
        "name", name=TEXT, persistentVolumeClaim=an_object("claimName", claimName=TEXT),
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
    (container,), (volume,) = pod["containers"], pod["volumes"]
    # the trainer changes the container of this name in the job of this name
    assert replicated["name"] == container["name"] == "node"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    (mount,) = container["volumeMounts"]
    assert mount["name"] == volume["name"]
    assert f"--folder={mount['mountPath']}" in trainer()["args"]
    # names that the trainer keeps for itself
    assert not any(each["name"].startswith("PET_") for each in trainer()["env"])


def test_the_container_trains_as_two_pods(place: Path, reference: Path):
    """With the variables of Kubeflow's torch plugin, and of this machine."""
    job, port = trainer(), str(free_port())
    of_both = {each["name"]: each["value"] for each in job["env"]} | {
        "PET_NNODES": str(job["numNodes"]),
        "PET_NPROC_PER_NODE": str(job["numProcPerNode"]),
        "PET_MASTER_ADDR": "localhost",  # of the first pod: NAME-node-0-0.NAME
        "PET_MASTER_PORT": port,
    }
    (place / "shared").mkdir()
    pods = []
    for rank in range(job["numNodes"]):
        variables = of_both | {"PET_NODE_RANK": str(rank)}
        # Kubernetes puts variables into command and args
        words = [
            re.sub(r"\$\((\w+)\)", lambda name, v=variables: v[name[1]], word)
            for word in [*job["command"], *job["args"]]
        ]
        words = [
            word.replace("--folder=/shared", f"--folder={place}/shared")
            for word in words
        ]
        pods.append(subprocess.Popen(
            words, cwd=ROOT, env=environ(place, **variables), stderr=subprocess.PIPE,
            text=True,
        ))  # fmt: skip
    said = [pod.communicate(timeout=150)[1] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], said
    check(place / "shared", reference)
