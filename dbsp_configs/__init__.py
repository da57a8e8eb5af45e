"""Configurations that come with db-SP, as YAML files: one for each model and mask source."""
