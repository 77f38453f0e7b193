"""A smaller causal LM with the same tokenizer drafts a chain.

Leviathan et al. 2022; Chen et al. 2023.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from outpace.core.law import History
from outpace.core.proposal import Drawn, Proposal, Verdict
from outpace.core.transfer import to_device
from outpace.core.tree import Tree
from outpace.draft.base import Drafter, Rows, Setup
from outpace.draft.chains import Chains
from outpace.errors import ConfigError
from outpace.targets.hf.fixed import PENDING, fixed_for
from outpace.targets.hf.load import Loaded, check_same_vocabulary, load_drafter
from outpace.targets.hf.runner import PREFILL_CHUNK, Runner
from outpace.targets.hf.source import check_path
from outpace.targets.hf.weights import pass_bytes

CATCH_UP = 16
"""Unseen tokens that are fed beside other rows' in one pass; more are cached row by row first."""


class DraftModel(Drafter):
    """Draws each token from the model's law under the request's own options, left to right.

    Nothing leaves the device while it drafts, unless the rule ends chains early. Its cache is fed
    whatever the row has that it has not seen, so that nothing special happens after a full
    acceptance, a rejection or rounds without it. Rows beyond its context propose nothing.
    """

    name: ClassVar[str] = "draft_model"
    draws: frozenset[Drawn] = frozenset({Drawn.IID})
    options: ClassVar[Mapping[str, Any]] = {
        **dict.fromkeys(("model", "tokenizer", "dtype", "device")),
        "quantization": "auto",
        "trust_remote_code": False,
    }

    def __init__(self, drafter: Loaded, runner: Runner, vocabulary: int) -> None:
        self.loaded = drafter
        self.runner = runner
        self._vocabulary = vocabulary
        self.weight_bytes = drafter.nbytes
        self.pass_bytes = pass_bytes(runner.model)
        self._trees: dict[tuple[int, int], Tree] = {}

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        if options["model"] is None:
            raise ConfigError(f"method {cls.name!r} needs 'model': the drafter's path or name.")
        if isinstance(options["model"], (str, os.PathLike)):
            check_path(options["model"])

    @classmethod
    def build(cls, setup: Setup) -> DraftModel:
        """Loads ``model``; see `load_drafter`."""
        target, options = setup.target, setup.options
        drafter = load_drafter(
            options["model"],
            target,
            tokenizer=options["tokenizer"],
            dtype=options["dtype"],
            device=options["device"],
            cpu_kernels=setup.cpu_kernels if options["quantization"] in (None, "auto") else "auto",
            quantization=options["quantization"],
            trust_remote_code=options["trust_remote_code"],
        )
        check_same_vocabulary(target, drafter)
        fixed = fixed_for(drafter.model) if setup.compile else None
        runner = Runner(drafter.model, setup.rows, drafter.max_length, fixed)
        return cls(drafter, runner, target.vocabulary)

    @property
    def nbytes(self) -> int:
        return self.weight_bytes + self.runner.cache.nbytes

    @property
    def compile_seconds(self) -> float:
        return self.runner.compile_seconds

    def admit(self, prompts: Sequence[Sequence[int]]) -> None:
        self.runner.admit(len(prompts))

    def retain(self, rows: Sequence[int]) -> None:
        self.runner.retain(rows)

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        counts = self._affordable(rows, budgets)
        if not any(counts):
            return Proposal.empty(len(rows), rows.seeds.device)
        live = [count > 0 for count in counts]
        if (view := self._one_step(rows, live, max(counts))) is not None:
            return self._in_one_step(rows, counts, live, view)
        logits = self._catch_up(rows, live)  # [B, V]
        chains = Chains(rows, counts)
        while chains.grow(logits):
            output = self.runner.forward(chains.tokens[:, -1:], keep=1)
            self.runner.advance([int(row) for row in live])
            logits = self._fitted(output.logits[:, -1])
        return chains.proposal(self._tree(len(rows), chains.length))

    # -- chains of fixed shape, drafted in one step -------------------------------------------

    def _one_step(self, rows: Rows, live: Sequence[bool], length: int) -> int | None:
        """The slots that the passes of such a step see, once all but a few tokens have been read;
        None where drafting asks the host."""
        if self.runner.fixed is None or not rows.law.is_fixed or rows.brief.keeps_drafting:
            return None
        for row, on in enumerate(live):
            unseen = rows.since(row, self.runner.lengths[row]) if on else []
            if len(unseen) > PENDING:
                self.runner.prefill(row, [unseen[:-1]])
        return self.runner.fixed_view(PENDING, length)

    def _in_one_step(
        self, rows: Rows, counts: Sequence[int], live: Sequence[bool], view: int
    ) -> Proposal:
        """Drafts chains with nothing but one step of the `StepRunner`."""
        assert self.runner.fixed is not None
        lengths, device = self.runner.lengths, self.runner.device
        pending = [rows.since(row, lengths[row]) if on else [] for row, on in enumerate(live)]
        tokens = [[*unseen, *[0] * (PENDING - len(unseen))] for unseen in pending]
        seen = [len(unseen) for unseen in pending]
        length = max(counts)
        inputs = to_device(tokens, device), to_device(seen, device), to_device(lengths, device)

        def step(
            tokens: Tensor,
            seen: Tensor,
            starts: Tensor,
            seeds: Tensor,
            positions: Tensor,
            *columns: Tensor,
        ) -> tuple[Tensor, ...]:
            nothing = History([[]] * len(rows), [[]] * len(rows))
            same = Rows(nothing, rows.law.over(columns), seeds, positions, rows.brief)
            chains = Chains(same, [length] * len(rows))
            logits = self.runner.fixed_pass(view, tokens, starts)  # [B, P, V]
            last = (seen - 1).clamp(min=0)[:, None, None].expand(-1, -1, logits.shape[-1])
            logits, starts = logits.gather(1, last), starts + seen
            while chains.grow(self._fitted(logits[:, -1])):
                logits = self.runner.fixed_pass(view, chains.tokens[:, -1:], starts)
                starts = starts + 1
            return chains.drawn

        key = "chain", len(rows), length, view, rows.brief, rows.law.kind
        given = *inputs, rows.seeds, rows.positions, *rows.law.columns
        drawn = self.runner.fixed.player.play(key, step, given)
        self.runner.passes += length
        self.runner.advance([new + (length - 1) * on for new, on in zip(seen, live, strict=True)])
        return Chains.given(rows, counts, drawn, self._tree(len(rows), length))

    def observe(self, rows: Rows, proposal: Proposal, verdict: Verdict) -> None:
        lengths = self.runner.lengths
        for row, accepted in enumerate(verdict.nodes):
            # The last drafted token was never fed, so it is not cached even if it was accepted.
            lengths[row] = min(lengths[row], rows.length(row) + accepted)

    def rewind(self, rows: Rows) -> None:
        # The last committed token is fed once more: its logits are gone.
        for row, length in enumerate(self.runner.lengths):
            self.runner.lengths[row] = min(length, rows.length(row) - 1)

    def _tree(self, rows: int, nodes: int) -> Tree:
        """The first nodes of a draft: few shapes come again and again, with all that a tree
        derives."""
        if (rows, nodes) not in self._trees:
            self._trees[rows, nodes] = self._shaped(rows, nodes)
        return self._trees[rows, nodes]

    def _shaped(self, rows: int, nodes: int) -> Tree:
        return Tree.chain(rows, nodes, self.runner.device)

    def _affordable(self, rows: Rows, budgets: Sequence[int]) -> list[int]:
        room = [self.runner.max_length - rows.length(row) for row in range(len(rows))]
        return [max(0, min(pair)) for pair in zip(budgets, room, strict=True)]

    def _catch_up(self, rows: Rows, live: Sequence[bool]) -> Tensor:
        """Feeds what each live row has committed since; returns the logits after it, ``[B, V]``."""
        lengths = self.runner.lengths
        pending = [
            rows.since(row, lengths[row]) if drafting else [] for row, drafting in enumerate(live)
        ]
        alike = len({len(unseen) for unseen in pending}) == 1
        most = PREFILL_CHUNK if alike else CATCH_UP
        for row, unseen in enumerate(pending):
            if len(unseen) > most:
                left = (len(unseen) - 1) % PREFILL_CHUNK + 1 if alike else 1
                self.runner.prefill(row, [unseen[:-left]])
                pending[row] = unseen[-left:]
        width = max(map(len, pending))
        tokens = [[*unseen, *[0] * (width - len(unseen))] for unseen in pending]
        device = self.runner.device
        # Where all rows end together, only their last logits are needed.
        keep = 1 if alike else width
        output = self.runner.forward(to_device(tokens, device), keep=keep)
        self.runner.advance([len(unseen) for unseen in pending])
        if alike:
            return self._fitted(output.logits[:, -1])
        last = to_device([max(0, len(unseen) - 1) for unseen in pending], device)
        row_index = torch.arange(len(pending), device=device)
        return self._fitted(output.logits[row_index, last])

    def _fitted(self, logits: Tensor) -> Tensor:
        """Cut or filled up to the target's vocabulary; tokens that it lacks are never proposed."""
        missing = self._vocabulary - logits.shape[-1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits[..., : self._vocabulary]
