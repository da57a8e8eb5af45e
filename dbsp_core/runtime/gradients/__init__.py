"""The backward of dual-balanced attention."""
