"""Timed runs: a benchmark, what passes cost, load on a server."""
