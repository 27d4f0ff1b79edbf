"""Pictures as SVG: lanes of what ran when, memory and its blocks, dry runs.

`picture.py` has what all are made of. What is public of this is `simgpu.pictures`.
"""
