"""``outpace train``."""
