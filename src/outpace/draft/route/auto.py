"""Look-ups, a draft model or nothing: whatever brings most, round by round."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from outpace.core.proposal import Drawn, Proposal
from outpace.core.values import flag
from outpace.draft.base import Drafter, Pick, Rows, Setup
from outpace.draft.models.options import DraftModelOptions
from outpace.draft.models.sight import check_wanted
from outpace.draft.options import option
from outpace.draft.registry import drafter_names
from outpace.draft.route.base import Asked, Several, check_configs, rule_of
from outpace.draft.route.joining import cut, eldest_chain
from outpace.errors import ConfigError
from outpace.targets.hf.loading.loaded import Loaded, check_model
from outpace.targets.hf.loading.source import check_path

LOOK_UPS = ("suffix", "ngram")
"""The look-ups that are asked unless others are named, as far as they exist: the best one first."""


@dataclass(frozen=True, kw_only=True)
class AutoOptions(DraftModelOptions):
    """What a user may set."""

    model: Any = option(None, "The draft model, if there is one; else look-ups draft alone.")
    trees: bool = option(False, "Whether the draft model drafts trees where these pay.")
    lookups: Any = option(None, "The look-ups, each as a speculative_config; unset: the best one.")

    def __post_init__(self) -> None:
        if self.model is not None:
            check_model(self.model)
        if isinstance(self.model, (str, os.PathLike)):
            check_path(self.model)
        check_wanted(self.images)
        flag("trees", self.trees, error=ConfigError)
        check_configs("auto", "lookups", self.look_ups)
        if self.model is None:
            for one in fields(DraftModelOptions):
                if getattr(self, one.name) != one.default:
                    raise ConfigError(f"{one.name!r} is about a draft model: give 'model', too.")

    @property
    def look_ups(self) -> Any:
        """The configs of the look-ups."""
        if self.lookups is not None:
            return self.lookups
        known = drafter_names()
        return [{"method": next(name for name in LOOK_UPS if name in known)}]

    @property
    def model_configs(self) -> list[dict[str, Any]]:
        """The config of the draft model in a list, which is empty without one."""
        if self.model is None:
            return []
        given = {one.name: getattr(self, one.name) for one in fields(DraftModelOptions)}
        return [{"method": "draft_tree" if self.trees else "draft_model", **given}]


class AutoDrafter(Several):
    """Asks the look-ups in every round, and lets the controller choose among what they found, the
    draft model and plain decoding, by measured costs and what each of them brings
    (`outpace.policy.routing`).

    With a fixed num_speculative_tokens the first look-up that finds anything drafts, and otherwise
    the draft model.
    """

    name: ClassVar[str] = "auto"
    Options: ClassVar[type[Any]] = AutoOptions
    draws: frozenset[Drawn] = frozenset({Drawn.POINT, Drawn.IID})

    def __init__(self, children: Sequence[Drafter], names: Sequence[str], vocabulary: int) -> None:
        super().__init__(children, names, vocabulary)
        self.choices = dict(zip(names, children, strict=True))
        self._look_ups = [n for n, child in enumerate(children) if not child.pass_bytes]
        self._models = [n for n, child in enumerate(children) if child.pass_bytes]
        self.any_shape = any(child.any_shape for child in children)

    @classmethod
    def usual_rule(cls, options: Any) -> str:
        return rule_of([*options.look_ups, *options.model_configs])

    @classmethod
    def build(cls, setup: Setup) -> Drafter:
        configs = [*setup.options.look_ups, *setup.options.model_configs]
        children = [setup.child(config) for config in configs]
        names = [child.name for child in children]
        if len(set(names)) < len(names):
            raise ConfigError("'lookups' names one method twice: name each once.")
        if len(children) == 1:
            return children[0]  # how much it drafts, if anything, is all that there is to choose
        return cls(children, names, setup.loaded.vocabulary)

    @classmethod
    def specimen(cls, loaded: Loaded) -> Mapping[str, Any]:
        from outpace.draft.registry import find_drafter

        model = find_drafter("draft_model").specimen(loaded)["model"]
        return {"model": model, "lookups": [{"method": "ngram", "prompt_lookup_min": 1}]}

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        asked = {self.names[n]: self.ask(n, rows, budgets) for n in self._look_ups}
        found = {name: list(map(eldest_chain, each.nodes)) for name, each in asked.items()}
        picks = (rows.route or self._first)(found, budgets)
        for n in self._models:
            name = self.names[n]
            asked[name] = self.ask(n, rows, [p.budget if p.name == name else 0 for p in picks])
        listed = list(asked.values())
        place = {name: at for at, name in enumerate(asked)}
        made = self.join(listed, [place.get(pick.name, 0) for pick in picks])
        counts = [self._count(asked, pick, row) for row, pick in enumerate(picks)]
        return cut(made, counts)

    def _first(
        self, found: Mapping[str, Sequence[Sequence[int]]], budgets: Sequence[int]
    ) -> list[Pick]:
        """The first look-up that found something in a row, or the draft model."""
        model = self.names[self._models[0]] if self._models else ""
        return [
            Pick(next((name for name in found if found[name][row]), model), budget)
            for row, budget in enumerate(budgets)
        ]

    @staticmethod
    def _count(asked: Mapping[str, Asked], pick: Pick, row: int) -> int:
        return min(pick.budget, asked[pick.name].counts[row]) if pick.name in asked else 0
