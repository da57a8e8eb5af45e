"""Assignment of rows to ranks, and of keys and values to chunks."""
