"""Who holds which tokens outside attention."""
