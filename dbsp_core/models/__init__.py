"""The models that db-SP knows: their sizes, how they are told apart, and the videos they make."""
