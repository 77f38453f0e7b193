"""``outpace generate``."""
