"""The `dbsp` commands that need a room of their own."""
