"""Plan a training run on GPUs that are not there: bytes, traffic, seconds.

Models: a Llama-shaped network, mixed precision (weights, gradients and AdamW's two
moments in float32, computing in bfloat16), and one step of training. Its bytes are
found twice: `tracked` runs the step on tensors without memory and lets PyTorch's own
FSDPMemTracker count; `bytes_per_gpu` does the same by arithmetic, which says why.
`traffic` is arithmetic as well. `step_seconds` asks the simulator what each kernel and
collective takes; it knows GPT's blocks, too. `compare` and `predict_published` set it
beside runs that others have published.
Leaves out: what the caching allocator wastes, CUDA's own memory (0.5 to 1 GB), NCCL's
buffers, AdamW's temporaries (there are none if it is fused), data loading, pipeline and
context parallelism, torch.compile, float8, and GPUs or links that differ in speed.

The files: model.py, run.py, memory.py, communication.py, kernels.py, step_time.py,
published.py, tracker.py with its process tracker_process.py, torch_private.py for
PyTorch's private names, and explore.py with sliders. Lesson 25 uses this package.
"""

from scripts.plan.communication import traffic
from scripts.plan.kernels import SUSTAINED
from scripts.plan.memory import Bytes, bytes_per_gpu, moments
from scripts.plan.model import MODELS, build, parameters
from scripts.plan.published import (
    FITTED,
    PUBLISHED,
    compare,
    left_out,
    mfu_as_published,
    predict_published,
)
from scripts.plan.step_time import flops, step_seconds
from scripts.plan.tracker import tracked, tracked_all, tracked_moments

__all__ = [
    "FITTED", "MODELS", "PUBLISHED", "SUSTAINED", "Bytes", "build", "bytes_per_gpu",
    "compare", "flops", "left_out", "mfu_as_published", "moments", "parameters",
    "predict_published", "step_seconds", "tracked", "tracked_all", "tracked_moments",
    "traffic",
]  # fmt: skip
