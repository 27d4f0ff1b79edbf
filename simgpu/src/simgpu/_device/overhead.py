"""Memory of a card that PyTorch does not count: CUDA's context and NCCL's buffers.

PyTorch counts cuBLAS's: `workspaces.py`. All of it is taken where a whole card is
simulated, and not from a card that was given less memory than it has; but a dry run
takes it from a card of any size that is one. The constants are assumed unless a source
is given.
"""

from simgpu._device.cards import KIB, MIB

# Of a process on a GPU, once it uses CUDA: kernels, stacks, queues. nvidia-smi shows
# 400 to 600 MiB on A100 and H100 for a process that has allocated nothing.
CONTEXT = 450 * MIB
# Of a communicator: a buffer for each protocol (LL, LL128, Simple) in each channel, for
# the neighbour that sends. Sizes: NCCL's defaults (src/init.cc, computeBuffSizes).
NCCL_CHANNELS = 16
NCCL_BUFFERS = NCCL_CHANNELS * (512 * KIB + 120 * 640 * 8 * 8 + 4 * MIB)
# Bytes from which on memory is that of a card, for a dry run; less is an example's, of
# which nothing is taken.
SMALLEST_CARD = 4096 * MIB
