"""Strategies and sequence layouts: the ranks, and the tokens that each holds outside attention."""
