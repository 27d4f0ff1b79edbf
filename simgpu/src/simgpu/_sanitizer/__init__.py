"""Races between streams, found by PyTorch's own stream sanitizer."""
