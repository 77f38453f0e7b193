"""How each kind of network learns."""
