"""Ranks with simulated GPUs: `torch.distributed` for scripts that ask for NCCL.

    torchrun --nproc-per-node=4 -m simgpu script.py

Every rank is a process with simulated GPUs of its own. gloo carries the values, and
`torch.distributed` is PyTorch's own, with DDP's reducer in C++.
Models: what NCCL refuses (tensors on the host, strided or sparse ones, two ranks on one
GPU, a rank that changes its GPU); the time of a collective, as that of a ring over the
cards' links, on the current stream.
Leaves out: waiting for a rank that is late (each rank has a clock of its own), that
NCCL has a stream of its own beside the computing (and so races with it), links between
machines, the memory of NCCL's buffers, `ProcessGroupNCCL` with its options, and what
gloo cannot do (it raises `NotSimulated`).
"""
