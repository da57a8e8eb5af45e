"""Block masks: the key blocks that each query block attends to."""
