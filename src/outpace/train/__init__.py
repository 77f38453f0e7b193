"""Training of drafters: heads over a target's hidden states, classifiers, small models."""
