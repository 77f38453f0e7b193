"""Tiny networks that judge tokens which others have drafted."""
