"""The `dbsp` commands, one per module."""
