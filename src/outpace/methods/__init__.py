"""Methods of drafting, a module each."""
