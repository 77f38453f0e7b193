"""Log-probabilities of what was emitted, for the requests that ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.core.proposal import Proposal
from outpace.draft.base import Rows
from outpace.engine.request import Logprob, Request
from outpace.engine.verifier import Decision, branches_of


def logprobs_of(
    logits: Tensor,
    proposal: Proposal,
    rows: Rows,
    requests: Sequence[Request],
    decisions: Sequence[Decision],
) -> list[list[dict[int, Logprob]]]:
    """Returns, per row and emitted token, its log-probability and those of the most probable.

    Empty for rows that did not ask. A token's distribution is that of the node it follows.
    """
    if all(request.params.logprobs is None for request in requests):
        return [[] for _ in requests]
    branches = branches_of(proposal)
    table = rows.pipeline.reported(logits, branches, rows.history)  # [B, M, V]
    found: list[list[dict[int, Logprob]]] = []
    for row, (request, decision) in enumerate(zip(requests, decisions, strict=True)):
        count = request.params.logprobs
        if count is None:
            found.append([])
            continue
        nodes = [0, *decision.path]
        logprobs = table[row, nodes]  # [emitted, V]
        pairs = zip(logprobs, decision.tokens, strict=True)
        found.append([_entry(own, token, count) for own, token in pairs])
    return found


def _entry(logprobs: Tensor, token: int, count: int) -> dict[int, Logprob]:
    value = logprobs[token]
    rank = int((logprobs > value).sum()) + 1
    entry = {token: Logprob(float(value), rank)}
    top = torch.topk(logprobs, min(count, logprobs.shape[-1]))
    ranked = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    for place, (other, logprob) in enumerate(ranked, 1):
        entry.setdefault(other, Logprob(logprob, place))
    return entry
