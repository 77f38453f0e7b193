"""Other programs that do the same jobs."""
