"""Compiling our own code for this processor, and keeping what was compiled."""
