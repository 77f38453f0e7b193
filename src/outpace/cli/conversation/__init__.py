"""A conversation with a model: what was said, what is sent of it, and the commands about it."""
