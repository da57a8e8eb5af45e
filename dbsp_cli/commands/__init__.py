"""The `dbsp` commands with a module of their own."""
