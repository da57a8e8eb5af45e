"""Images and videos of several sizes in one call of a transformer, packed one after another."""
