"""Tools for mask files."""
