"""A transformer's sequence and batch over ranks, by hooks that can be undone."""
