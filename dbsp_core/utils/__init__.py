"""Errors, files, settings and other parts that know nothing of attention."""
