"""Cost of an attention on a machine in bytes and seconds, and the choice of the cheapest strategy."""
