"""What PyTorch's Python functions say while GPUs are simulated, by subject.

Each function here stands for one of PyTorch's; the table of all that is replaced is
`_patches.py`.
"""
