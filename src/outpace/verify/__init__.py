"""Verification rules: each is a distribution, written as two functions of (p, proposal).

    stop(p, proposal)        [B, M]  probability that the walk ends at each node
    next(p, proposal, node)  [B, V]  distribution of the one extra token, given that it ended there

Rules know neither models nor drafters. Each lossless rule has a file of its own; the lossy ones are
in `lossy` and `mixtures`. `registry` finds all of them by name.
"""
