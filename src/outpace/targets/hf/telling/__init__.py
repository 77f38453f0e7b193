"""Models that count positions by slots or columns are told where each token stands in a pass."""
