"""What figures mean: intervals, formulas, divergence, whether texts are the same."""
