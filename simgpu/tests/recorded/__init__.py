"""Figures that were measured on real GPUs, and what the simulator says of the same.

files.py        reads a folder of recordings; which rows constants were fitted to
cards.py        the cards that recordings name
comparison.py   a prediction beside a measurement, and what many of them come to
operations.py   products, convolutions, passes, launches, copies, collectives
steps.py        whole passes and steps of training, from `programs/`
memory.py       peaks of training steps
replay.py       traces of the allocator
"""
