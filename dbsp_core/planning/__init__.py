"""Assignment of rows to ranks, and of the keys and values that each rank is sent to chunks."""
