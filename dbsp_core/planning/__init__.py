"""Which rank computes which rows, and in which ring slot keys travel."""
