"""A drafter for each kind of request, by the tag that the request brings: a task, a language.

Yi et al. 2024, "Towards fast multilingual LLM inference: speculative decoding and specialized
drafters" (arXiv 2406.16758), has one drafter per language.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from outpace.core.options import Options
from outpace.core.proposal import DraftSampling
from outpace.core.request import PerRequest, Request
from outpace.core.values import shown
from outpace.draft.base import Rows, Setup
from outpace.errors import ConfigError
from outpace.methods.choosers.base import Children, check_config, dummy_configs, rule_of
from outpace.methods.choosers.choosing import SelectingDrafter
from outpace.targets.hf.loading.loaded import LoadedModel


@dataclass(frozen=True, kw_only=True)
class RoutesOptions(Options):
    """What a user may set."""

    method: ClassVar[str] = "tagged"
    """The method that these options are of."""
    routes: Any
    """A drafter for each tag, as {tag: speculative_config}."""
    default: Any = None
    """The drafter of all other requests, as a speculative_config."""

    def __post_init__(self) -> None:
        super().__post_init__()
        named = isinstance(self.routes, Mapping) and len(self.routes) > 0
        if not named or not all(isinstance(tag, str) for tag in self.routes):
            raise ConfigError(
                "routes must name a drafter for each tag, such as {'code': {'model': 'a/model'}}, "
                f"not {shown(self.routes)}."
            )
        for config in self.configs:
            check_config(self.method, config)

    @property
    def configs(self) -> list[Any]:
        """The config of the default, then those of the tags in their order."""
        default = {"method": "none"} if self.default is None else self.default
        return [default, *self.routes.values()]


class Tagged(SelectingDrafter):
    """Drafts for each row with the child of its tag (`SamplingParams.tag`)."""

    name: ClassVar[str] = "tagged"
    Options: ClassVar[type[Any]] = RoutesOptions
    sampling_kinds: frozenset[DraftSampling] = frozenset(
        {DraftSampling.DETERMINISTIC, DraftSampling.IID}
    )

    def __init__(self, given: Children, tags: Sequence[str]) -> None:
        """given: the default drafter, then those of the tags."""
        super().__init__(given)
        self._numbers = {tag: number for number, tag in enumerate(tags, 1)}
        self._routes = PerRequest(self.route, lasting=True)

    @classmethod
    def default_rule_for(cls, options: Any) -> str:
        return rule_of(options.configs)

    @classmethod
    def build(cls, setup: Setup) -> Tagged:
        return cls(Children.of(setup, setup.options.configs), list(setup.options.routes))

    @classmethod
    def dummy_options(cls, loaded: LoadedModel) -> Mapping[str, Any]:
        model, ngram = dummy_configs(loaded, "draft_model", "ngram")
        return {"routes": {"copying": ngram}, "default": model}

    def route(self, request: Request) -> int:
        """Returns the number of the child that drafts for a new request."""
        return self._numbers.get(request.tag or "", 0)

    def choice(self, rows: Rows) -> list[int]:
        return [self._routes[request] for request in rows.requests]
