"""``outpace bench``."""
