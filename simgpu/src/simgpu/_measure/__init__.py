"""`simgpu measure`: what a machine's own GPUs take, and the constants of a card.

command.py      the command line, and which of the GPUs are measured
timing.py       how a time is taken: events, a cold cache, medians; the time left
figures.py      what is measured of one card
links.py        what is measured between GPUs, under torchrun
facts.py        names, versions, memory
fit.py          figures -> the constants of a card and a network
files.py        the file that is written

Nothing but PyTorch is needed on the machine that is measured. Without a GPU the same
functions run in a dry run, whose clock says what they measure.
"""
