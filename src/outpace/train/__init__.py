"""Training of drafters: heads over the hidden states of one target, in one process."""
