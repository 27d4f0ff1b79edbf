"""Ranks with simulated GPUs: `torch.distributed` for scripts that ask for NCCL.

    torchrun --nproc-per-node=4 -m simgpu script.py

Every rank is a process with simulated GPUs of its own. `torch.distributed` is PyTorch's
own, with DDP's reducer in C++, FSDP, DTensor and pipelines in Python; the simulator
answers where they call NCCL.
Models: the values of every collective that NCCL has; one simulated time for all ranks,
with NCCL's own streams; what NCCL refuses; ranks that wait for each other in vain.
Leaves out: what NCCL's options change, collectives in CUDA graphs, symmetric memory;
that the first message between two ranks makes them wait for each other; and a program
whose host goes on to launch work on a second stream while a first one waits for another
rank: the values are computed by the host, so it waits where they are needed.
"""
