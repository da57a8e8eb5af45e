"""Masks predicted from queries and keys, by all ranks together."""
