"""Masks predicted from queries and keys: pooled blocks, their scores, and which are chosen."""
