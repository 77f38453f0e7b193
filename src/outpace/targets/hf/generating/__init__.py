"""Arguments and options of transformers' own ``generate``."""
