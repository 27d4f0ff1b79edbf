"""Layouts of a decoder, a thousand in a minute: `simgpu plan`.

A step is composed from its parts. What a block, the embedding and the head do on one
rank is dry-run once for each micro-batch and number of slices, as PyTorch runs it;
how often, beside which messages and behind which other stage is computed.
"""
