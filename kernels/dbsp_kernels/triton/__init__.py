"""Implementations in Triton."""
