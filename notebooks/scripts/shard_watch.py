"""What `gpt_watch.py` counts with: bytes of tensors on this rank."""


def in_memory(tensors) -> int:
    """Bytes on this rank; views of one memory count once."""
    here = [getattr(t, "_local_tensor", t).detach() for t in tensors]  # of a DTensor
    storages = [tensor.untyped_storage() for tensor in here]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())
