"""A Llama of transformers, from a configuration: behind the seam of the trainers."""

import torch
from llama import counted  # noqa: F401
from seam import Model, decayed, first_value  # noqa: F401
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

FIRST, LAST = ("model.embed_tokens",), ("model.norm", "lm_head")


class Llama(Model, LlamaForCausalLM):
    blocks = property(lambda self: self.model.layers)

    def embed(self, batch):
        return self.model.embed_tokens(batch["tokens"])

    def seen(self, batch):  # mask, places, cache, use of it, angles
        tokens = batch["tokens"]
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        float32 = torch.empty((), device=tokens.device)
        return None, places, None, False, self.model.rotary_emb(float32, places)

    def losses(self, x, batch):
        scores = self.lm_head(self.model.norm(x)).flatten(0, 1).float()
        return cross_entropy(scores, batch["targets"].flatten(), reduction="sum")

    def fill_buffers(self):
        made = LlamaRotaryEmbedding(self.config)
        for name, buffer in made.named_buffers():
            self.model.rotary_emb.get_buffer(name).copy_(buffer)


def make(size, context):
    sizes = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=4)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    return Llama(
        LlamaConfig(vocab_size=256, tie_word_embeddings=True, **sizes, **heads)
    )
