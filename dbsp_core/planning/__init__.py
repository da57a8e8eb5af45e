"""Which rank computes which rows, and in which chunks keys and values come to it."""
