"""Self-attention of diffusers' transformers: found fit, pinned to a backend, and answered by db-SP."""
