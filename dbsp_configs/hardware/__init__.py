"""Constants of machines that come with db-SP, as YAML files, for the latency model."""
