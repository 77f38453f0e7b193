"""Heads that attend over the whole text, token after token: EAGLE and its relatives."""
