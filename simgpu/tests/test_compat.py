"""One missing name of PyTorch takes one feature away; versions that are not tested."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import simgpu
from simgpu import _compat
from support import checkout
from support.limits import JOB, LONG

FOLDER = Path(simgpu.__file__).parent


def run(script: str, *options: str, **environment: str) -> subprocess.CompletedProcess:
    """Run a script in a process of its own."""
    return subprocess.run(
        [sys.executable, *options, "-c", script], capture_output=True, text=True,
        timeout=JOB, env={**os.environ, **environment},
    )  # fmt: skip


# -- where the names stand -------------------------------------------------------------


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(path: Path) -> set[str]:
    """What a file names of PyTorch that has a private part: "torch._C._nn"."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    known, found = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                known[alias.asname or first] = alias.name if alias.asname else first
                found.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                known[alias.asname or alias.name] = full
                found.add(full)
    for node in ast.walk(tree):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in known:
            found.add(".".join([known[node.id], *reversed(parts)]))
    return {
        name
        for name in found
        if name.split(".")[0] == "torch"
        and not name.startswith("torch.ops.")  # of operations, which have a schema
        and any(map(is_private, name.split(".")))
    }


def test_private_names_of_pytorch_stand_in_one_file():
    files = {
        path.relative_to(FOLDER).as_posix()
        for path in checkout.files(FOLDER, "*.py")
        if path.name != "_compat.py" and private_names(path)
    }
    assert files == set()


def test_each_name_stands_once():
    ours = [name for names in _compat._NAMES.values() for name in names]
    theirs = [path for names in _compat._NAMES.values() for path in names.values()]
    assert len(ours) == len(set(ours)) and len(theirs) == len(set(theirs))
    assert _compat.DOORS.keys() <= set(ours)


def test_what_this_pytorch_does_not_have_is_known():
    absent = {
        name
        for names in _compat._NAMES.values()
        for name in names
        if _compat.is_absent(getattr(_compat, name))
    }
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    known = {"ensure_backend"} if version < (2, 14) else {"raw_begin_sequence"}
    known |= {"check_stray_context"} if version < (2, 15) else set()
    known |= {"raw_propagate_strided"} if version < (2, 13) else set()
    assert absent == known


# -- one name is missing ---------------------------------------------------------------

# each in a fork of one process: delete the name, start, add two numbers on a GPU
WITHOUT = """if True:
    import os, sys, warnings
    warnings.simplefilter("ignore")
    import torch, torch.distributed, torch.distributed.rpc
    from simgpu import _compat

    paths = {ours: path for names in _compat._NAMES.values()
             for ours, path in names.items()}
    chosen = sys.argv[1:] or list(paths)
    for path in paths.values():
        try:
            _compat._find(path)
        except (AttributeError, ImportError):
            pass
    for module in [name for name in sys.modules if name.startswith("simgpu")]:
        del sys.modules[module]
    del _compat
    for ours in chosen:
        sys.stdout.flush()
        if os.fork():
            os.wait()
            continue
        path = paths[ours]
        owner, _, last = path.rpartition(".")
        try:
            from simgpu import _compat
            delattr(_compat._find(owner), last)
            sys.modules[path] = None
        except (AttributeError, TypeError):
            print(ours, "stays")  # it belongs to a type of C, or is not here anyway
            os._exit(0)
        try:
            import simgpu
            simgpu.start(2)
            print(ours, "started", end=" ")
            assert torch.ones(3, device="cuda").add(1).sum().item() == 6
            print("added", end=" ")
            weight = torch.ones(3, device="cuda", requires_grad=True)
            weight.sum().backward()
            print("trained")
        except Exception as error:
            print(type(error).__name__, " ".join(str(error).split()))
        sys.stdout.flush()
        os._exit(0)
"""
needs_forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


def without(*names: str) -> dict[str, str]:
    """What happens where a name is missing: {our name: how far a program came}."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *names], capture_output=True, text=True,
        timeout=LONG, env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    assert lines, done.stderr
    return {name: rest for name, _, rest in lines}


@needs_forks
def test_a_missing_name_disables_its_feature_and_not_the_start():
    backward = "raw_run_backward", "current_autograd_node"
    reached = without(*backward, "sdp_priority_order", "take_tensors")
    for name in backward:
        assert reached[name].startswith("started added NotSimulated backward is not")
        assert f"PyTorch {torch.__version__} has no torch." in reached[name]
        assert "tested with PyTorch 2.11 to 2.15" in reached[name]
    assert reached["sdp_priority_order"] == reached["take_tensors"]
    assert reached["take_tensors"] == "started added trained"


@needs_forks
def test_a_missing_name_raises_where_its_feature_is_used():
    script = """if True:
        import torch, torch.nn.functional as F
        del torch._C._get_sdp_priority_order
        import simgpu
        simgpu.start(1)
        x = torch.ones(1, 1, 2, 2, device="cuda")
        print((x @ x).sum().item())
        F.scaled_dot_product_attention(x, x, x)
    """
    done = run(script)
    assert done.stdout.strip() == "8.0"
    assert "NotSimulated: scaled_dot_product_attention is not simulated" in done.stderr
    assert "has no torch._C._get_sdp_priority_order" in done.stderr


# -- versions --------------------------------------------------------------------------


def with_version(version: str, then: str) -> subprocess.CompletedProcess:
    return run(f"import torch; torch.__version__ = {version!r}; import simgpu; {then}")


def test_a_newer_pytorch_than_tested_is_named_in_one_line():
    then = "simgpu.start(1); simgpu.stop(); simgpu.start(1)"
    done = with_version("2.99.0+cpu", then)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "simgpu is tested" in line]
    assert len(lines) == 1
    assert "tested with PyTorch 2.11 to 2.15, and this is 2.99.0+cpu" in lines[0]
    assert "please report" in lines[0]


def test_a_pytorch_that_was_tested_is_not_worth_a_word():
    done = run("import simgpu; simgpu.start(1)")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_pytorch_that_is_too_old_is_named_with_what_to_do():
    done = with_version("2.9.1", "simgpu.start(1)")
    last = done.stderr.splitlines()[-1]
    assert last == (
        "ImportError: simgpu needs PyTorch 2.11 to 2.15, and this is 2.9.1: "
        "pip install --upgrade torch"
    )


NOT_FOUND = """if True:
    import importlib.util; find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *more: (
        None if name == {!r} else find(name, *more))
"""
NOT_IMPORTED = "import sys; sys.modules[{!r}] = None\n"


@pytest.mark.parametrize("hide, package, words", [
    (NOT_FOUND, "torch", "--gpus 1"), (NOT_FOUND, "numpy", "--gpus 1"),
    (NOT_IMPORTED, "torch", "dry-run --world 8"), (NOT_IMPORTED, "torch", "prove"),
])  # fmt: skip
def test_a_missing_package_is_named_with_what_to_do(hide, package, words, tmp_path):
    sentence = f"simgpu needs {package}, which is not installed here: pip install "
    script = tmp_path / "script.py"
    script.write_text("print('not reached')", encoding="utf-8")
    lines = hide.format(package)
    done = run(
        f"{lines}import sys; sys.argv = ['simgpu', *{words.split()}, {str(script)!r}]\n"
        "from simgpu.__main__ import main; main()"
    )
    assert (done.stdout, done.stderr.strip()) == ("", sentence + package)
    assert done.returncode == 1
    if hide is NOT_FOUND:
        done = run(lines + "import simgpu; simgpu.start(1)")
        assert done.stderr.splitlines()[-1] == f"ImportError: {sentence}{package}"


# -- news of 2.15 ----------------------------------------------------------------------


@pytest.mark.skipif(
    not hasattr(torch.cuda, "_check_stray_context"), reason="since torch 2.15"
)
def test_a_context_that_was_there_before_set_device_is_reported():
    script = """if True:
        import simgpu, torch
        simgpu.start(2)
        x = torch.ones(3, device="cuda:0")
        torch.cuda.set_device(1)
    """
    done = run(script, TORCH_CUDA_CHECK_STRAY_CONTEXT="error")
    assert "existing CUDA primary context on device(s) [0]" in done.stderr
    assert run(script).returncode == 0


@pytest.mark.skipif(
    not hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype"), reason="since torch 2.15"
)
@pytest.mark.simulated_gpus(1)
def test_fsdp_packs_gradients_at_the_cost_that_it_had():
    gradients = [torch.ones(8, 4, device="cuda"), torch.ones(2, 4, device="cuda")]
    packed = torch.empty(2, 20, device="cuda")
    simgpu.timeline().clear()
    for pack in (torch.ops.fsdp.chunk_cat_mixed_dtype, torch._chunk_cat):
        pack(gradients, dim=0, num_chunks=2, out=packed)
    one, two = simgpu.timeline().events
    assert one.name == two.name == "_chunk_cat"
    assert one.nbytes == two.nbytes
    gradients[1] = gradients[1].bfloat16()
    torch.ops.fsdp.chunk_cat_mixed_dtype(gradients, dim=0, num_chunks=2, out=packed)
    assert packed.tolist() == [[1.0] * 20] * 2
