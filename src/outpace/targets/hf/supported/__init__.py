"""Which models can be decoded speculatively, and why others cannot."""
