"""The models that db-SP knows: their sizes, what distinguishes them, and the videos they make."""
