"""``outpace audit``."""
