"""Verification rules: each is a distribution, written as two functions of (p, proposal).

    stop(p, proposal)        [B, M]  probability that the walk ends at each node
    next(p, proposal, node)  [B, V]  distribution of the one extra token, given that it ended there

Rules know neither models nor drafters. One rule per file; `registry` finds them by name.
"""
