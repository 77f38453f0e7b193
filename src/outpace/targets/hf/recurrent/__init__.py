"""Models with a recurrent or linear-attention state."""
