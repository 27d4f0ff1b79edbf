"""A Llama that learns in seconds, in the place of the trainer's model.py. Lesson 28.

    cp trainer/model.py llama.py
    cp little_llama.py model.py

It is the trainer's own model, with other sizes and other first values: tied weights,
rotary tables that no checkpoint has, and half as many heads of keys as of queries.
"""

import llama
from llama import FIRST, LAST, counted, cut, decayed, slices  # noqa: F401
from torch import nn

SIZES = llama.Sizes(
    vocabulary=256, width=64, layers=2, heads=4, key_heads=2, hidden=192, tied=True
)


def make(size, context):
    return llama.Llama(SIZES, context)


def first_value(name, p):
    """So narrow a layer learns sooner from larger weights."""
    if p.ndim > 1:
        nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    else:
        nn.init.ones_(p)
