"""What the system shows of this process: `/proc/PID/cmdline` and `/proc/PID/environ`.

Both are memory of the process, as its first program was given it. A forked process that
becomes another program writes there what that one would have been given, for `ps` and
for whoever looks for a rank by its environment.
"""

import ctypes
import os

ROOM = "SIMGPU_ROOM"  # a variable that is there to make the environment larger
_BYTES = 4096  # for what a launcher adds to it
# of /proc/PID/stat, counted behind the name of the process
_ARGUMENTS, _ENVIRON = slice(45, 47), slice(47, 49)


def with_room(environ: dict[str, str]) -> dict[str, str]:
    """An environment for a process that will show others."""
    return environ | {ROOM: "." * _BYTES}


def take(arguments: list[str], environ: dict[str, str]) -> None:
    """Have this environment, and let the system show both, as far as there is room."""
    os.environ.clear()  # C has copies of what is set anew: nothing reads the old ones
    os.environ.update(environ)
    os.environ.pop(ROOM, None)
    pairs = [f"{name}={value}" for name, value in os.environ.items()]
    with open("/proc/self/stat", "rb") as file:
        numbers = file.read().rpartition(b")")[2].split()
    for where, words in ((_ARGUMENTS, arguments), (_ENVIRON, pairs)):
        start, end = map(int, numbers[where])
        text = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - start]
        if start:  # 0: the system keeps it to itself
            ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
