"""Errors, files and other small things that know nothing of attention."""
