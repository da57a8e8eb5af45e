"""Images and videos of several sizes packed in one call of a transformer."""
