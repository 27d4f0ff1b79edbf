"""Counts what a rank hands to each collective: the kind, the bytes, the group.

    with Messages() as messages:
        messages.when = "backward"
        loss.backward()
    messages.total()                     # bytes
    messages.by_name()                   # {"all_reduce": (2, 1204264)}

Sees every call below autograd, whoever makes it: the program, DDP's reducer, FSDP,
DTensor, pipelines. `_distributed/messages.py` says which operations are collectives and
what a rank gives to each; here they are counted. Leaves out what a thread of C++ sends
by itself (the later messages of the PowerSGD hook), barriers, and what a rank receives.
"""

import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from simgpu._distributed.messages import Message, message_of


class Messages(TorchDispatchMode):
    """Notes each message of this rank, while it is entered.

    Attributes:
        when: a note for the messages to come; set it as you like.
        log: the messages so far, in order.
    """

    def __init__(self):
        super().__init__()
        self.when = ""
        self.log: list[Message] = []
        self._threads: list[bool] = []

    def __enter__(self) -> "Messages":
        # On GPUs backward() would run in threads of its own, which have no modes.
        self._threads.append(torch.autograd.is_multithreading_enabled())
        torch.autograd.set_multithreading_enabled(False)
        return super().__enter__()

    def __exit__(self, *exc_info):
        torch.autograd.set_multithreading_enabled(self._threads.pop())
        return super().__exit__(*exc_info)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if any(map(_is_dtensor, types)):
            # its own code comes first, and makes calls that come here again
            return NotImplemented
        message = message_of(op, args, kwargs)
        if message is not None:
            self.log.append(message._replace(when=self.when))
        return op(*args, **(kwargs or {}))

    def total(self) -> int:
        """Bytes that the rank has handed over in all."""
        return sum(message.nbytes for message in self.log)

    def sent(self) -> int:
        """Bytes that the rank has sent, if the ranks of each group form a ring."""
        return sum(message.sent for message in self.log)

    def by_name(self) -> dict[str, tuple[int, int]]:
        """Collective -> (how many calls, bytes handed over)."""
        table: dict[str, tuple[int, int]] = {}
        for message in self.log:
            calls, nbytes = table.get(message.name, (0, 0))
            table[message.name] = (calls + 1, nbytes + message.nbytes)
        return table


def _is_dtensor(kind: type) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # not there: nobody has one
    return module is not None and issubclass(kind, module.DTensor)
