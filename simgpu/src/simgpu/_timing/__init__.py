"""Simulated time: what work costs, when it runs, and the log of what ran.

Pure Python: nothing here knows of tensors, and nothing needs PyTorch.
"""
