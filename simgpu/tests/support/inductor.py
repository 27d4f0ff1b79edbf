"""What Inductor makes of `compiled_models` for an H100 that is not here: its schedule.

AOTAutograd cuts the graph of fake tensors into forward and backward, and Inductor's
scheduler fuses each as for CUDA; nothing is generated or run. Prints JSON: of each
model and direction the kernels that are fused and their bytes, and the bytes that are
kept for backward, without inputs and parameters.

    python inductor.py [MODEL ...]
"""

import copy
import json
import sys
from types import SimpleNamespace

import compiled_models
import torch
from torch._dynamo.device_interface import CudaInterface
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx, scheduler
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import post_grad, reinplace
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._pytree import tree_map

CARD = SimpleNamespace(
    name="H100", major=9, minor=0, multi_processor_count=132, warp_size=32,
    total_memory=80 * 2**30, regs_per_multiprocessor=65536, gcnArchName="",
    max_threads_per_multi_processor=2048, L2_cache_size=50 * 2**20,
    shared_memory_per_block_optin=227 * 1024,
)  # fmt: skip
CUDA = torch.device("cuda", 0)


def pretend() -> None:
    """There is a GPU and a Triton, as far as a schedule asks."""
    scheduler.has_triton = lambda: True
    CudaInterface.get_device_properties = staticmethod(lambda device=None: CARD)
    CudaInterface.Worker.get_device_properties = staticmethod(lambda device=None: CARD)
    CudaInterface.get_compute_capability = staticmethod(lambda device=None: 90)
    torch.cuda.get_device_properties = lambda device=None: CARD
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.current_device = lambda: 0
    reinplace._inplace_generalized_scatter = lambda x, source, views: torch.empty_like(
        x
    )
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    F.scaled_dot_product_attention = lambda q, k, v, is_causal: flash(
        q, k, v, 0.0, is_causal
    )[0]


def on_cuda(module, inputs):
    """A copy of a graph of the CPU, and its inputs, on CUDA."""
    mode = detect_fake_mode(inputs)
    module = copy.deepcopy(module)

    def moved(value):
        if not isinstance(value, torch.Tensor):
            return value
        with mode:
            shape, strides = value.shape, value.stride()
            return torch.empty_strided(shape, strides, dtype=value.dtype, device=CUDA)

    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map(moved, node.meta["val"])
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": CUDA}
    module.recompile()
    return module, [moved(value) for value in inputs]


def fused(module, inputs, backward: bool) -> dict[str, int]:
    """The kernels that the scheduler fuses of a graph."""
    module, inputs = on_cuda(module, inputs)
    with V.set_fake_mode(detect_fake_mode(inputs)):
        compile_fx.view_to_reshape(module)
        post_grad.post_grad_passes(module, False)
        graph = GraphLowering(module, example_inputs=inputs, is_backward=backward)
        with V.set_graph_handler(graph), V.set_debug_handler(DebugContext()):
            graph.run(*inputs)
            graph._update_scheduler()
            nodes = [
                node for node in graph.scheduler.nodes
                if not isinstance(node, (scheduler.ExternKernelSchedulerNode,
                                         scheduler.NopKernelSchedulerNode))
            ]  # fmt: skip
            nbytes = [node.get_read_write_buffers_sizes() for node in nodes]
    return {"kernels": len(nodes), "bytes": sum(nbytes)}


def schedule(make) -> dict:
    """Of a model: forward, backward, and the bytes that are kept between them."""
    found: dict = {}

    def part(joint, inputs, *, num_fwd_outputs, **options):
        compile_fx._recursive_joint_graph_passes(joint)
        forward, backward = min_cut_rematerialization_partition(
            joint, inputs, compiler="inductor", num_fwd_outputs=num_fwd_outputs,
            **options,
        )  # fmt: skip
        (out,) = (node for node in forward.graph.nodes if node.op == "output")
        kept = [node for node in out.args[0][num_fwd_outputs:] if made(node)]
        found["kept"] = sum(node.meta["val"].nbytes for node in kept)
        return forward, backward

    def compiler(name: str):
        def run(module, inputs):
            found[name] = fused(module, inputs, name == "backward")
            return module.forward

        return run

    with FakeTensorMode(allow_non_fake_inputs=True):
        module, inputs = make()
        module = _Tuple(module)
        run = aot_module_simplified(
            module, inputs, fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"), partition_fn=part,
            decompositions=select_decomp_table(),
        )  # fmt: skip
        (out,) = run(*inputs)
        out.backward(torch.empty_like(out))
    return found


class _Tuple(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return (self.module(*inputs),)


def made(node) -> bool:
    """Whether a tensor is neither an input nor a view of one."""
    while node.op == "call_function" and node.target in _VIEWS:
        node = node.args[0]
    value = node.meta.get("val")
    return node.op != "placeholder" and isinstance(value, torch.Tensor)


aten = torch.ops.aten
_VIEWS = {aten.permute.default, aten.t.default, aten.view.default, aten.detach.default,
          aten.transpose.int}  # fmt: skip

if __name__ == "__main__":
    pretend()
    for name in sys.argv[1:] or compiled_models.CASES:
        print(json.dumps({name: schedule(compiled_models.CASES[name])}))
