"""Strategies, and sequence layouts: the tokens that each rank holds outside attention."""
