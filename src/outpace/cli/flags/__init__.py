"""Flags that verbs share, and what the library is given for them."""
