"""Incidents: right training programs, and what goes wrong with them in production.

`programs/` has complete programs that are right. An `Incident` is one of them with
some lines changed, after a public report. A `Variant` is one with lines changed that is
still right. `simgpu.prove` must find and place every incident, and stay silent on all
others.

Taught in 29-find-the-bug.
"""

from incidents.incident import Incident, Variant, write
from incidents.right import PROGRAMS, VARIANTS
from incidents.wrong import INCIDENTS

__all__ = ["INCIDENTS", "PROGRAMS", "VARIANTS", "Incident", "Variant", "write"]
