"""Keys and values in slots, and which of them a pass sees."""
