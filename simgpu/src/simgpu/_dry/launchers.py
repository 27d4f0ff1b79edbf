"""What stands behind a launcher is the program; it says how many ranks there are.

A launcher's own parser reads its words. Of `accelerate launch` all its code runs, up to
where it would start ranks: what it has set in the environment by then is the program's.
It and DeepSpeed do so in a process of their own, since they look for GPUs when they are
imported, and remember what they found.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

_TORCHRUN = {"torchrun", "torch.distributed.run", "torch.distributed.launch"}
_ACCELERATE = {"accelerate", "accelerate.commands.accelerate_cli"}
_ACCELERATE_LAUNCH = {"accelerate-launch", "accelerate.commands.launch"}
_SAID = ("program", "module", "arguments", "world", "node", "environ",
         "says_local_rank")  # fmt: skip


def look_behind(options, made: argparse.ArgumentParser) -> None:
    """Put the program, its words and its ranks into `options`, if a launcher is there.

    Args:
        options: `program`, `module`, `arguments`, `world`, `node`; and what the program
            is to have beside what each rank has: `environ`, and whether its first word
            is `--local_rank` (`says_local_rank`).
        made: says what is wrong.
    """
    options.environ, options.says_local_rank = {}, False
    name = options.program if options.module else os.path.basename(options.program)
    words = options.arguments
    if name in _TORCHRUN:
        _torchrun(options, made, words)
    elif name in _ACCELERATE and words[:1] == ["launch"]:
        options.arguments = words[1:]
        _ask_apart("accelerate", options)
    elif name in _ACCELERATE_LAUNCH:
        _ask_apart("accelerate", options)
    elif name == "deepspeed" and not options.module:
        _ask_apart("deepspeed", options)


def _ask_apart(launcher: str, options) -> None:
    """See `_accelerate` and `_deepspeed`, in a process of its own."""
    said = {name: getattr(options, name) for name in _SAID}
    with tempfile.TemporaryDirectory(prefix="simgpu") as folder:
        path = Path(folder, "said.json")
        path.write_text(json.dumps(said), encoding="utf-8")
        command = [sys.executable, "-m", __name__, launcher, str(path)]
        if status := subprocess.run(command).returncode:
            raise SystemExit(status)
        vars(options).update(json.loads(path.read_text(encoding="utf-8")))


def _answer(launcher: str, path: Path) -> None:
    """What `_ask_apart` started."""
    options = argparse.Namespace(**json.loads(path.read_text(encoding="utf-8")))
    usage = "%(prog)s --world N ..."
    made = argparse.ArgumentParser(prog="simgpu dry-run", usage=usage)
    ask = {"accelerate": _accelerate, "deepspeed": _deepspeed}[launcher]
    ask(options, made, options.arguments)
    path.write_text(json.dumps(vars(options)), encoding="utf-8")


def _torchrun(options, made: argparse.ArgumentParser, words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    _take(options, made, get_args_parser().parse_args(words), "torchrun")


def _take(options, made, theirs, name: str) -> None:
    """What torchrun has been told."""
    if not theirs.training_script:
        made.error(f"{name} is followed by no script")
    each = str(theirs.nproc_per_node)
    nodes = str(theirs.nnodes).rpartition(":")[2]
    if options.world is None and each.isdecimal() and nodes.isdecimal():
        options.world = int(each) * int(nodes)
        options.node = options.node or int(each)
    options.program, options.module = theirs.training_script, theirs.module
    options.arguments = theirs.training_script_args


def _accelerate(options, made: argparse.ArgumentParser, words: list[str]) -> None:
    import torch.distributed.run as torchrun

    launch = _module("accelerate.commands.launch", made)
    theirs = launch.launch_command_parser().parse_args(words)
    if options.world is not None:  # says more than a file of settings
        theirs.num_processes = options.world
    theirs.machine_rank = theirs.main_process_port = 0
    has_file = theirs.config_file or os.path.isfile(launch.default_config_file)
    if not has_file and (theirs.num_processes or 1) > 1:
        chosen = (theirs.use_fsdp, theirs.use_deepspeed, theirs.use_megatron_lm)
        theirs.multi_gpu = not any(chosen)  # as it does where it finds GPUs
    validate = launch._validate_launch_command
    before, found = dict(os.environ), []

    def validated(args):
        args, *more = validate(args)
        if options.node is None and (args.num_machines or 1) > 1:
            options.node = args.num_processes // args.num_machines
        args.num_machines = 1  # for which it asks for no other machine's address
        return args, *more

    def run(args) -> None:
        found.append((args, dict(os.environ)))

    def alone(args) -> None:
        made.error("accelerate launch would start one process: write --world N")

    with (
        mock.patch.object(launch, "_validate_launch_command", validated),
        mock.patch.object(launch, "simple_launcher", alone),
        mock.patch.object(torchrun, "run", run),
    ):
        launch.launch_command(theirs)
    if not found:
        made.error("accelerate launch starts no ranks through torchrun")
    its, environ = found[0]
    options.environ = {
        name: value
        for name, value in environ.items()
        if before.get(name) != value and name != "CUDA_VISIBLE_DEVICES"
    }
    _take(options, made, its, "accelerate launch")


def _deepspeed(options, made: argparse.ArgumentParser, words: list[str]) -> None:
    theirs = _module("deepspeed.launcher.runner", made).parse_args(words)
    each, nodes = theirs.num_gpus, max(theirs.num_nodes, 1)
    if options.world is None and each > 0:
        options.world, options.node = each * nodes, options.node or each
    options.program, options.module = theirs.user_script, theirs.module
    options.arguments = list(theirs.user_args)
    options.says_local_rank = not theirs.no_local_rank


def _module(name: str, made: argparse.ArgumentParser):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        made.error(f"{name.partition('.')[0]} cannot be imported: {error}")


if __name__ == "__main__":
    _answer(sys.argv[1], Path(sys.argv[2]))
