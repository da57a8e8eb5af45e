"""What an attention costs on a machine: bytes, seconds, and the strategy that costs least."""
