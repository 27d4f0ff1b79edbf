"""transformers and accelerate: one model over two GPUs, by its layers; then it writes.

python -m simgpu --gpus 2 --memory 4MB transformers_dispatch.py
"""

import torch
from accelerate import cpu_offload, infer_auto_device_map
from transformers import LlamaConfig, LlamaForCausalLM


def saved(folder: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, **sizes, **heads))
    model.save_pretrained(folder)
    return model.eval()


def main() -> None:
    alone = saved("model")
    model = LlamaForCausalLM.from_pretrained("model", device_map="balanced")
    places = set(model.hf_device_map.values())
    assert places == {0, 1}, model.hf_device_map
    assert torch.cuda.memory_allocated(0) > 0 < torch.cuda.memory_allocated(1)
    words = torch.arange(6)[None]
    with torch.no_grad():
        expected, found = alone(words).logits, model(words.cuda()).logits
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    written = model.generate(words.cuda(), **how)
    assert written.is_cuda
    assert torch.equal(written.cpu(), alone.generate(words, **how))

    limits = {0: "300KB", 1: "10MB"}
    by_hand = infer_auto_device_map(alone, max_memory=limits)
    assert set(by_hand.values()) == {0, 1}, by_hand
    offloaded = cpu_offload(saved("model"), execution_device=torch.device("cuda", 1))
    with torch.no_grad():
        found = offloaded(words.cuda(1)).logits
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)

    half = LlamaForCausalLM.from_pretrained("model", dtype=torch.float16).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        assert half(words.cuda()).logits.is_cuda
    print("ok", flush=True)


main()
