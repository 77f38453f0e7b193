"""Drafters that were trained for one target: small networks over its hidden states."""
