"""The `dbsp` command."""
