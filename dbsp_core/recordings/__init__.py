"""The masks of a run: recorded, read back, described."""
