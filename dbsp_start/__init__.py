"""How db-SP's processes start and end with each other, and what is told by a command line or done at an import.

Light: nothing here imports torch, and `dbsp_core` would."""
