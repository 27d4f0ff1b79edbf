"""Put one layer of a model on each GPU that this process sees, and say which it is.

    CUDA_VISIBLE_DEVICES=0,1 python which_gpus.py A

Used in lesson 01.
"""

import sys

import torch
from torch import nn


def card(index: int) -> str:
    """The UUID of the card that this process calls cuda:index."""
    return str(torch.cuda.get_device_properties(index).uuid)


def main(model: str) -> None:
    device = torch.accelerator.current_accelerator(check_available=True)
    count = torch.cuda.device_count()
    print(f"model {model} runs on {device or 'cpu'} and sees {count} GPUs")
    layers = [nn.Linear(4, 4, device=i) for i in range(count)]
    for i, layer in enumerate(layers):
        print(f"  layer {i} on {layer.weight.device}, card {card(i)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
