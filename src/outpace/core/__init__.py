"""Distributions, random streams, trees, proposals: torch only, no model, no I/O, no globals.

Letters used for shapes everywhere: B rows, N drafted nodes, M = N + 1 nodes with the root, T tokens
in a forward pass, S cache slots, V vocabulary, D depth. p is the target's distribution, q the
draft's (Leviathan et al. 2022).
"""
