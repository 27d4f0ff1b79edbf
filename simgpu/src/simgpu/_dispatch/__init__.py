"""What happens to each operation of PyTorch: where it runs, and what it costs.

A tensor on a simulated GPU is a plain CPU tensor whose *storage* carries a mark
(`placement.py`). A dispatch mode (`mode.py`) sees every operation below autograd, makes
a `Call` of it (`operation_call.py`), and runs it by what is known of it
(`operation.py`).
"""
