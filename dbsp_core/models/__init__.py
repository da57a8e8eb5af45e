"""Known models: their sizes, signatures and default videos."""
