"""How each token came about: what the playground draws."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from outpace.engine.request import Request
from outpace.engine.trace import RoundTrace
from outpace.engine.verifier import Decision

log = logging.getLogger("outpace.serve")

Origin = Literal["accepted", "corrected", "bonus", "plain"]
"""A drafted token that was kept; the target's own in the place of a drafted one; the target's own
behind a draft that was kept to its end; one of a round without a draft."""


def origins(decision: Decision, parents: Sequence[int]) -> list[Origin]:
    """Returns where each token that a round emits came from. parents: of the drafted nodes."""
    if not decision.drafted:
        return ["plain"]
    last = decision.path[-1] if decision.path else 0
    extra: Origin = "corrected" if last in parents else "bonus"
    kept: list[Origin] = ["accepted"] * len(decision.path)
    return [*kept, extra]


class Tracer:
    """An observer that writes down the rounds of the requests that ask for it."""

    def __init__(
        self, decode: Callable[[int], str], special: Collection[int] = frozenset()
    ) -> None:
        """special: tokens whose names are no text, such as the end of a turn."""
        self._decode, self._special = decode, special
        # Written by the engine's thread, emptied by another: a deque takes both without a lock.
        self._rounds: dict[int, deque[dict[str, Any]]] = {}

    def follow(self, requests: Sequence[Request]) -> None:
        """Begins to write down the rounds of these requests."""
        for request in requests:
            self._rounds[id(request)] = deque()

    def leave(self, requests: Sequence[Request]) -> None:
        """Forgets these requests."""
        for request in requests:
            self._rounds.pop(id(request), None)

    def take(self, request: Request) -> list[dict[str, Any]]:
        """Returns the rounds that were written down since the last time."""
        rounds = self._rounds.get(id(request), deque())
        return [rounds.popleft() for _ in range(len(rounds))]

    def __call__(self, trace: RoundTrace) -> None:
        if not self._rounds:
            return
        for row, request in enumerate(trace.requests):
            rounds = self._rounds.get(id(request))
            if rounds is not None:
                self._write(rounds, trace, row)

    def _write(self, rounds: deque[dict[str, Any]], trace: RoundTrace, row: int) -> None:
        """Adds a round of a row. Where a token cannot be decoded, its trace ends there, and no
        text."""
        try:
            rounds.append(self._round(trace, row))
        except Exception:
            log.exception("a round could not be written down, and the trace of its text ends")
            self.leave([trace.requests[row]])

    def _round(self, trace: RoundTrace, row: int) -> dict[str, Any]:
        decision, drafted = trace.decisions[row], trace.decisions[row].drafted
        tokens = trace.proposal.tokens[row, :drafted].tolist()
        parents = trace.proposal.tree.parents[row, :drafted].tolist()
        taken = trace.emitted[row]
        return {
            "nodes": [
                {**self._token(token), "parent": parent}
                for token, parent in zip(tokens, parents, strict=True)
            ],
            "path": decision.path[:taken],
            "tokens": [
                {**self._token(token), "origin": origin}
                for token, origin in zip(
                    decision.tokens[:taken], origins(decision, parents), strict=False
                )
            ],
            "seconds": round(trace.seconds.total, 6),
        }

    def _token(self, token: int) -> dict[str, Any]:
        return {"id": token, "text": self._decode(token), "special": token in self._special}


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Returns the tokens that an answer leaves out (``skip_special_tokens``); none without a
    tokenizer."""
    named = getattr(tokenizer, "all_special_ids", ())
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset((*named, *(token for token, one in added.items() if one.special)))
