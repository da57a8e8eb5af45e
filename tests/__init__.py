"""Tests of db-SP, and what they share: imported as `tests.…` from the repository root."""
