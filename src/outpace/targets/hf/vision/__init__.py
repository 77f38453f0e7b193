"""Prompts with images: what a processor makes of them, and how a model reads them."""
