"""Drafters that choose among others by what they have learned from earlier rounds."""
