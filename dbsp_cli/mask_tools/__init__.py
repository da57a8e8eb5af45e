"""Masks of other projects as mask files."""
