"""Sharding a transformer's sequence and CFG passes over ranks, by reversible hooks."""
