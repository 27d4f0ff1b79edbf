"""The loopback network card of this machine, on which ranks of one machine talk."""

import sys

LOOPBACK = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)  # its name, if known
