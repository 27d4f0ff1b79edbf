"""Between a trainer and a model: all that one knows of the other.

A file `model.py` has these names. Those of this file may be imported from it.

| name                 | what it is                               | for         | here |
|----------------------|------------------------------------------|-------------|------|
| make(size, context)  | the model, a `Model` without values;     | all         |      |
|                      | `size` is --size                         |             |      |
| counted(batch)       | how many losses a batch has, a tensor    | all         | rows |
| first_value(name, p) | gives p, a full parameter, its values    | all         | yes  |
| decayed(name, p)     | whether weight decay is for it           | all         | yes  |
| FIRST, LAST          | names of all that only `embed`, and only | stages,     |      |
|                      | `losses`, use; single parameters, too    | whole       |      |
| slices(model)        | a module's name -> a word of styles.py   | slices,     |      |
|                      |                                          | --tp        |      |
| cut(batch, i, n)     | the i-th of n equal parts of the tokens  | long        | yes  |

`counted` from here counts rows. For a loss of each token, write your own: otherwise,
the first loss is far from the logarithm of the number of classes. Two trainers look for
attributes of modules, and put another function in their place: `attend(q, k, v, mask)`
(long, ring) and `exchange(experts, x, counts)`, beside a module `experts` (experts).

A file `data.py` has

    sets(path, context)      two datasets, to learn from and to be tested on, whose
                             samples are dictionaries; PyTorch stacks them to a batch.
                             With --end, it is passed as `end`
"""

import torch
from torch import nn


class Model(nn.Module):
    """What every model has. `batch` is a dictionary of tensors on the GPU."""

    blocks: nn.ModuleList  # block(x, *seen) has the shape of x

    def embed(self, batch):
        """What the first block reads, (rows, ...)."""
        raise NotImplementedError

    def seen(self, batch, part=slice(None)):
        """What every block reads besides, a tuple: for this part of the tokens."""
        return ()

    def losses(self, x, batch):
        """The sum of the losses in float32, from what the last block returns."""
        raise NotImplementedError

    def forward(self, batch):
        """All of these, in turn."""
        x, seen = self.embed(batch), self.seen(batch)
        for block in self.blocks:
            x = block(x, *seen)
        return self.losses(x, batch)

    def fill_buffers(self):
        """Give values to buffers, which have none yet.

        With stages, what belongs to another stage is None here.
        """

    def adjust(self, add_up):
        """After each step: what changes without a gradient.

        Args:
            add_up: sums a tensor, in its place, over ranks that had other tokens.
        """


def check(its, needs):
    """All names that model.py lacks, at once."""
    always = "make", "counted", "first_value", "decayed"
    lacks = [name for name in (*always, *needs) if not hasattr(its, name)]
    if lacks:
        raise SystemExit(
            f"model.py has no {', '.join(lacks)}; see the table in seam.py"
        )


def counted(batch):
    """A loss for each row."""
    rows = next(iter(batch.values()))
    return torch.tensor(len(rows), device=rows.device)


def cut(batch, i, n):
    """A part of each tensor (rows, tokens, ...), and which tokens it is of."""
    length = next(iter(batch.values())).shape[1] // n
    part = slice(i * length, (i + 1) * length)
    return {name: tensor[:, part] for name, tensor in batch.items()}, part


def first_value(name, p):
    """Weights of norms are one, biases zero, all others random and small."""
    if p.ndim > 1:
        nn.init.normal_(p, std=0.02)
    else:
        nn.init.constant_(p, not name.endswith("bias"))


def decayed(name, p):
    """Matrices, and no norms and biases."""
    return p.ndim > 1
