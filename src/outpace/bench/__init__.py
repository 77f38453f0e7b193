"""Measuring: synthetic pairs, interleaved paired runs, cost curves, reports."""
