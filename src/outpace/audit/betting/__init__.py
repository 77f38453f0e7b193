"""Sequential tests of texts, which may be stopped at any time."""
