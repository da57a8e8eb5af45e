"""Block masks: which blocks of keys each block of queries attends to."""
