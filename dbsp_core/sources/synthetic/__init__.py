"""Synthetic masks with the imbalance of published models."""
