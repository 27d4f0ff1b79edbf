"""A GPT-2 of transformers, from a configuration: behind the seam of the trainers."""

import torch
from llama import counted  # noqa: F401
from seam import Model, decayed, first_value  # noqa: F401
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

FIRST = ("transformer.wte", "transformer.wpe")
LAST = ("transformer.ln_f", "lm_head")


class GPT2(Model, GPT2LMHeadModel):
    blocks = property(lambda self: self.transformer.h)

    def embed(self, batch):
        places = torch.arange(batch["tokens"].shape[1], device=batch["tokens"].device)
        return self.transformer.wte(batch["tokens"]) + self.transformer.wpe(places)

    def losses(self, x, batch):
        scores = self.lm_head(self.transformer.ln_f(x)).flatten(0, 1).float()
        return cross_entropy(scores, batch["targets"].flatten(), reduction="sum")


def make(size, context):
    sizes = dict(vocab_size=256, n_positions=64, n_embd=64, n_layer=4, n_head=4)
    return GPT2(GPT2Config(**sizes, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0))
