"""Configuration: db-SP's settings, and which of the shipped ones go with a model."""
