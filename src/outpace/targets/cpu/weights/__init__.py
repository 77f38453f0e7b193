"""Weights in fewer bytes or in another order, and the layers that have them."""
