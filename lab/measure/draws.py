"""us of one draw by rule, rows and vocabulary: ``python lab/measure/draws.py``."""

import statistics
import time

import torch
from usage import usage

from outpace.core.proposal import Proposal, Sampled
from outpace.core.trees.tree import Tree
from outpace.verify.base import draw_verdict
from outpace.verify.registry import make_rule

usage(__doc__)

torch.set_num_threads(1)
CHAIN, FORKED = [0, 1, 2, 3, 4], [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9]
RULES = {"token": CHAIN, "block": CHAIN, "recursive": FORKED, "traversal": FORKED}

with torch.inference_mode():
    for name, parents in RULES.items():
        for rows, size in ((1, 8192), (8, 8192), (1, 32000), (8, 32000)):
            p = torch.randn(rows, len(parents) + 1, size).mul(3).softmax(-1)
            q = (p.log() + torch.randn(size) / 2).softmax(-1)[:, parents]
            tokens = q.flatten(0, 1).multinomial(1).view(rows, -1)
            counts = torch.full((rows,), len(parents))
            distribution = Sampled(q, with_replacement=parents is CHAIN)
            proposal = Proposal(tokens, Tree.uniform(parents, rows), counts, distribution)
            rule, seeds, took = make_rule(name), torch.arange(rows), []
            for position in range(40):
                begin = time.perf_counter()
                draw_verdict(rule, p, proposal, seeds, torch.full((rows,), position))
                took.append(time.perf_counter() - begin)
            print(name, rows, size, round(statistics.median(took) * 1e6))
