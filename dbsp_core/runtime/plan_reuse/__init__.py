"""Keeping plans from call to call while they are even enough (paper §4.2.1)."""
