"""Programs for work on db-SP, started from the repository root as `python -m scripts.…`."""
