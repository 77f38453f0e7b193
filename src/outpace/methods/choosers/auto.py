"""Look-ups, a draft model or plain decoding: whatever brings most, round by round."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

from outpace.core.options import options_of
from outpace.core.proposal import DraftSampling, Proposal
from outpace.draft.base import Drafter, Rows, Setup
from outpace.draft.registry import drafter_names, find_drafter
from outpace.draft.round import DrafterChoice, LookupDraft
from outpace.draft.state import FileName
from outpace.errors import ConfigError, ModelLoadError, UnsupportedModel
from outpace.heads.base import Head
from outpace.heads.checkpoint import find_head_kind
from outpace.methods.choosers.base import (
    ChildProposal,
    Children,
    CompositeDrafter,
    check_config,
    check_configs,
    check_look_up,
    rule_of,
)
from outpace.methods.models.options import DraftModelOptions, draft_model
from outpace.methods.online.options import WeightsOptions
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.loading.nextn import has_mtp_modules

LOGGER = logging.getLogger("outpace")

LOOK_UPS = ("suffix", "ngram")
"""The look-ups of which the first that exists is asked, unless others are named."""

OF_TARGET: Mapping[str, Any] = MappingProxyType({"method": "mtp"})
"""What drafts besides the look-ups where nothing is named and the target brings modules for it."""

OF_AUTO = ("model", "drafter", "lookups", "state")
"""Options that go with any kind of drafter."""

OF_HEADS = ("quantization", "online", "check")
"""Options that trained heads have."""


@dataclass(frozen=True, kw_only=True)
class AutoOptions(DraftModelOptions):
    """What a user may set."""

    model: Any = None
    """The draft model or trained head. Unset: the multi-token-prediction modules that the target
    brings, if it brings some; else look-ups draft alone."""
    drafter: Any = None
    """In the place of 'model': what drafts with the look-ups, as a speculative_config."""
    check: bool = True
    """Whether a trained head is tried when it is loaded, as the head's own option."""
    trees: bool = False
    """Whether the draft model drafts trees where these pay."""
    lookups: Any = None
    """The look-ups, each as a speculative_config; unset: the best one."""
    state: FileName = None
    """A file in which what is learned of texts and costs is kept between runs."""

    def __post_init__(self) -> None:
        WeightsOptions.__post_init__(self)  # a draft model's own checks are its method's
        check_configs("auto", "lookups", self.look_ups)
        if self.model is not None and self.drafter is not None:
            raise ConfigError("'model' and 'drafter' both name what drafts: give one of the two.")
        if self.drafter is not None:
            self._check_drafter()
        elif self.model is None:
            self._only((), "is about a draft model or head: give 'model', too.")
        elif self._kind is not None:
            self._only(OF_HEADS, f"is about a draft model, and 'model' is a {self._kind} head.")
            _refuse_aux_tokens(self._kind)
        else:
            fit = {one.name for one in options_of(DraftModelOptions)} | {"trees"}
            self._only(fit, "is about a trained head, and 'model' is none.")
            draft_model("model", self.model)

    def _check_drafter(self) -> None:
        method = check_config("auto", self.drafter).method
        if issubclass(find_drafter(method), CompositeDrafter):
            raise ConfigError(
                f"drafter cannot be {method!r}, which stands for several drafters: use it as the "
                "method."
            )
        _refuse_aux_tokens(method)
        self._only((), "is about 'model': set it inside 'drafter'.")

    def _only(self, fit: Collection[str], why: str) -> None:
        """Raises ``ConfigError`` where an option about a draft model is set that does not fit."""
        for one in options_of(AutoOptions):
            set_to = getattr(self, one.name)
            if one.name not in (*OF_AUTO, *fit) and set_to != one.default:
                raise ConfigError(f"{one.name!r} {why}")

    @property
    def look_ups(self) -> Any:
        """The configs of the look-ups."""
        if self.lookups is not None:
            return self.lookups
        known = drafter_names()
        return [{"method": next(name for name in LOOK_UPS if name in known)}]

    @property
    def _kind(self) -> str | None:
        """The kind of the head that ``model`` is; None if it is none."""
        return self.model.kind if isinstance(self.model, Head) else find_head_kind(self.model)

    @property
    def model_configs(self) -> list[dict[str, Any]]:
        """A list with the config of the drafter besides the look-ups; empty if there is none."""
        if self.drafter is not None:
            return [dict(self.drafter)]
        if self.model is None:
            return []
        if self._kind is not None:
            given = {name: getattr(self, name) for name in OF_HEADS}
            return [{"method": self._kind, "model": self.model, **given}]
        given = {one.name: getattr(self, one.name) for one in options_of(DraftModelOptions)}
        return [{"method": "draft_tree" if self.trees else "draft_model", **given}]


class AutoDrafter(CompositeDrafter):
    """Asks the look-ups in every round. The controller then chooses among their drafts, the draft
    model or trained head, and plain decoding, by what each brings and costs
    (`outpace.policy.auto`).

    With a fixed num_speculative_tokens the first look-up that finds anything drafts, and otherwise
    the draft model.
    """

    name: ClassVar[str] = "auto"
    Options: ClassVar[type[Any]] = AutoOptions
    sampling_kinds: frozenset[DraftSampling] = frozenset(
        {DraftSampling.DETERMINISTIC, DraftSampling.IID}
    )

    def __init__(self, given: Children) -> None:
        super().__init__(given)
        children = self.children
        self.candidate_drafters = dict(zip(self.names, children, strict=True))
        self._look_ups = [n for n, child in enumerate(children) if not child.pass_bytes]
        self._models = [n for n, child in enumerate(children) if child.pass_bytes]
        any_shape = any(child.capabilities.any_shape for child in children)
        self.capabilities = replace(self.capabilities, any_shape=any_shape)

    @property
    def max_depth(self) -> int | None:
        known = [child.max_depth for child in self.children if child.capabilities.any_shape]
        return min((levels for levels in known if levels is not None), default=None)

    @classmethod
    def default_rule_for(cls, options: Any) -> str:
        return rule_of([*options.look_ups, *options.model_configs])

    @classmethod
    def for_target(
        cls, options: Any, loaded: LoadedModel, verified: Callable[[type[Drafter]], bool]
    ) -> Any:
        left_open = options.model is None and options.drafter is None
        if left_open and verified(find_drafter(OF_TARGET["method"])) and has_mtp_modules(loaded):
            return replace(options, drafter=OF_TARGET)
        return options

    @classmethod
    def build(cls, setup: Setup) -> Drafter:
        children = [setup.child(config) for config in setup.options.look_ups]
        for child in children:
            check_look_up("lookups", child)
        drafters: list[Drafter] = []
        try:
            drafters += [setup.child(config) for config in setup.options.model_configs]
        except (UnsupportedModel, ModelLoadError) as error:
            if setup.options.drafter is not OF_TARGET:
                raise
            LOGGER.warning("outpace: %s Until then look-ups draft alone.", error)
        children += drafters
        children = [child for child in children if child.max_draft_tokens] or children
        names = [child.name for child in children]
        if drafters:
            _check_model(drafters[-1])
        if len(set(names)) < len(names):
            raise ConfigError("'lookups' names one method twice: name each once.")
        if len(children) == 1 and setup.options.state is not None:
            raise ConfigError(
                "'state' keeps what is learned of a choice among several drafters, and one look-up "
                "drafts alone: give 'model' or 'drafter', too."
            )
        if len(children) == 1:
            return children[0]  # only how much it drafts is left to choose
        given = Children(children, names, setup.loaded)
        made = cls(given)
        if setup.options.state is not None:
            made.file = given.state_file(setup.options.state, cls.name)
        return made

    @classmethod
    def dummy_options(cls, loaded: LoadedModel) -> Mapping[str, Any]:
        model = find_drafter("draft_model").dummy_options(loaded)["model"]
        return {"model": model, "lookups": [{"method": "ngram", "prompt_lookup_min": 1}]}

    def look_up(self, rows: Rows, budgets: Sequence[int]) -> Mapping[str, Sequence[LookupDraft]]:
        found = self.round_state(rows).found = [self.ask(n, rows, budgets) for n in self._look_ups]
        return self._by_name(found)

    def _by_name(self, found: Sequence[ChildProposal]) -> Mapping[str, Sequence[LookupDraft]]:
        return {self.names[each.child]: _lookup_drafts(each) for each in found}

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        picks = rows.picks
        if not picks:  # look-ups may have been asked all the same
            found = self._by_name(self.round_state(rows).found) or self.look_up(rows, budgets)
            picks = self._first(found, budgets)
        asked = {self.names[each.child]: each for each in self.round_state(rows).found}
        for n in self._models:
            name = self.names[n]
            asked[name] = self.ask(n, rows, [p.budget if p.name == name else 0 for p in picks])
        listed = list(asked.values())
        place = {name: at for at, name in enumerate(asked)}
        made = self.join(listed, [place.get(pick.name, 0) for pick in picks])
        counts = [
            min(pick.budget, asked[pick.name].counts[row]) if pick.name in asked else 0
            for row, pick in enumerate(picks)
        ]
        return made.first(counts)

    def _first(
        self, found: Mapping[str, Sequence[LookupDraft]], budgets: Sequence[int]
    ) -> list[DrafterChoice]:
        """The first look-up that found something in a row, or the draft model."""
        model = self.names[self._models[0]] if self._models else ""
        return [
            DrafterChoice(next((name for name in found if found[name][row].tokens), model), budget)
            for row, budget in enumerate(budgets)
        ]


def _lookup_drafts(asked: ChildProposal) -> list[LookupDraft]:
    """What a look-up found in each row."""
    pairs = zip(asked.nodes, asked.proposal.confidence or [()] * len(asked.nodes), strict=True)
    return [LookupDraft(nodes.eldest_chain(), confidence) for nodes, confidence in pairs]


def _refuse_aux_tokens(method: str) -> None:
    """Raises ``ConfigError`` for a drafter that cannot take turns with look-ups."""
    if find_drafter(method).capabilities.uses_aux_tokens:
        raise ConfigError(
            f"method 'auto' cannot take {method!r} as its drafter, which drafts inside the "
            "target's own pass: use it as the method."
        )


def _check_model(drafter: Drafter) -> None:
    """Raises ``ConfigError`` for a drafter that runs no model."""
    if not drafter.pass_bytes:
        raise ConfigError(
            f"method 'auto' cannot take {drafter.name!r} as its drafter, which runs no model: name "
            "look-ups in 'lookups'."
        )
