"""One simulated card: its datasheet, its memory, its caching allocator.

Nothing here replaces or sees anything of PyTorch; it can be used and tested alone.
"""
