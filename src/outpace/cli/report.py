"""Records and sentences about finished texts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from outpace.cli.flags.prompts import Entry
from outpace.core.account import Account, Mode
from outpace.core.stats import Metrics
from outpace.engine.request import Logprob
from outpace.outputs import CompletionOutput


def summary(metrics: Metrics, seed: int | None = None) -> str:
    """Returns one line about what a text, or several, cost."""
    parts = [
        f"{metrics.num_emitted_tokens} tokens in {metrics.total_seconds:.2f} s "
        f"({metrics.tokens_per_second:.1f} tokens/s)"
    ]
    rate = metrics.acceptance_rate
    if rate is not None:
        parts.append(f"acceptance rate {rate:.0%}")
        parts.append(f"mean acceptance length {metrics.mean_acceptance_length:.2f}")
    else:
        parts.append("nothing drafted")
    parts.append(f"{metrics.num_target_passes} target passes")
    if seed is not None:
        parts.append(f"seed {seed}")
    return ", ".join(parts)


def drafting(metrics: Metrics) -> str | None:
    """Returns a line about what texts were drafted with and why not with more; None where nothing
    could have drafted."""
    account = metrics.account
    if account is None or account.mode is Mode.NONE:
        return None
    return f"drafting: {account.sentence}"


def cost(metrics: Metrics, seed: int | None = None) -> str:
    """Returns the lines about what a text, or several, cost, and about what drafted."""
    return "\n".join(filter(None, (summary(metrics, seed), drafting(metrics))))


def merged(parts: Sequence[Metrics], seconds: float) -> Metrics:
    """Returns the counters of several texts together, over ``seconds`` of wall time."""
    return Metrics(
        num_target_passes=sum(part.num_target_passes for part in parts),
        num_draft_tokens=sum(part.num_draft_tokens for part in parts),
        num_accepted_tokens=sum(part.num_accepted_tokens for part in parts),
        num_emitted_tokens=sum(part.num_emitted_tokens for part in parts),
        total_seconds=seconds,
        account=Account.merged(part.account for part in parts),
    )


def record(entry: Entry, output: CompletionOutput, several: bool) -> dict[str, Any]:
    """Returns what ``--json`` prints about one text. several: it is one of n."""
    found: dict[str, Any] = {} if entry.id is None else {"id": entry.id}
    found["prompt"] = entry.text
    if several:
        found["index"] = output.index
    found |= {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "seed": output.seed,
    }
    if output.error is not None:
        found["error"] = output.error
    if output.logprobs is not None:
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        found["logprobs"] = [_logprobs(token, probs) for token, probs in pairs]
    return found | {"metrics": output.metrics.as_dict()}


def _logprobs(token: int, probs: Mapping[int, Logprob]) -> dict[str, Any]:
    ranked = sorted(probs.items(), key=lambda item: item[1].rank)
    # Tokens that the options rule out are no alternatives.
    top = [_logprob(*item) for item in ranked if math.isfinite(item[1].logprob)]
    return {**_logprob(token, probs[token]), "top": top}


def _logprob(token: int, logprob: Logprob) -> dict[str, Any]:
    return {
        "token_id": token,
        "token": logprob.decoded_token,
        # A lossy rule may keep a token that the options rule out; JSON has no infinity.
        "logprob": logprob.logprob if math.isfinite(logprob.logprob) else None,
        "rank": logprob.rank,
    }
