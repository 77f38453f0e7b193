"""The only importer of transformers: loading, support checks, the slot cache, masks, the runner."""
