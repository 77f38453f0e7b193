"""Targets that compute a token's logits alike whatever else is in the pass."""
