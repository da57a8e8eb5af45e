"""Configuration: db-SP's settings, the table of models, the video to generate."""
