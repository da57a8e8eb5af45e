"""Processes that end together or quickly, and import hooks. Needs only Python.

Nothing here imports torch, directly or through `dbsp_core`.
"""
