"""db-SP's own planner: heads, rows and slots, balanced over ranks and ring steps."""
