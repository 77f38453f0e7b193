"""The forms in which heads are kept in files: our own, and those of published heads."""
