"""The `dbsp` command, and everything that is done before or after a generation."""
