"""Errors, files, settings and other utilities independent of attention."""
