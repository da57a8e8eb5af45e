"""How db-SP's processes start and end with each other. Light: nothing here imports torch, and `dbsp_core` would."""
