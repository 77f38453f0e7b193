"""From the arguments of ``LLM`` to its engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from outpace.config import SpeculativeConfig
from outpace.draft.base import Drafter, Setup
from outpace.draft.registry import find_drafter
from outpace.engine.capture import capture_for
from outpace.engine.engine import Engine
from outpace.engine.order.registry import ORDERS
from outpace.engine.verifier import Verifier
from outpace.intake import Intake
from outpace.policy.lengths.registry import length_options
from outpace.policy.making import make_controller
from outpace.targets.cpu.kernels import Kernels
from outpace.targets.hf.loading.loaded import Loaded
from outpace.targets.hf.loading.making import make_target
from outpace.train.origin import origin_of
from outpace.verify.base import Rule
from outpace.verify.registry import make_rule


@dataclass(frozen=True)
class Speculation:
    """Who drafts and who verifies, with checked options."""

    config: SpeculativeConfig
    drafter: type[Drafter]
    options: Any
    """An instance of ``drafter.Options``."""
    rule: Rule

    @classmethod
    def of(cls, config: SpeculativeConfig) -> Self:
        """Returns what a configuration asks for; ``ConfigError`` where it makes no sense. Nothing
        is loaded."""
        drafter = find_drafter(config.method)
        options = drafter.configure(config.options)
        rule = make_rule(config.rule_name or drafter.usual_rule(options), **config.rule_options)
        if config.length_name is not None:
            length_options(config.length_name, config.length_options)
        return cls(config, drafter, options, rule)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What else an engine is built from."""

    cpu_kernels: Kernels
    compile: bool
    rows: int
    max_length: int
    max_batched_tokens: int
    scheduling_policy: str
    max_tokens_held: int | None
    saved_texts: int


def build_engine(
    loaded: Loaded, speculation: Speculation, intake: Intake, asked: EngineOptions
) -> Engine:
    """Returns the engine of a loaded model. Loads the draft model or the head, if there is one."""
    capture = capture_for if asked.compile else None
    fixed = None if capture is None else capture(loaded.model)
    target = make_target(
        loaded.model,
        asked.rows,
        asked.max_length,
        fixed,
        asked.saved_texts,
        asked.max_tokens_held,
    )
    setup = Setup(
        loaded=loaded,
        target=target,
        rows=asked.rows,
        max_length=asked.max_length,
        options=speculation.options,
        capture=capture,
        cpu_kernels=asked.cpu_kernels,
    )
    speculation.rule.recognise(lambda: origin_of(loaded))
    verifier = Verifier(speculation.rule, intake.second_text(speculation.rule))
    drafter = speculation.drafter.build(setup)
    return Engine(
        target,
        drafter,
        verifier,
        make_controller(speculation.config, drafter, verifier.coupled, target),
        loaded.vocabulary,
        asked.max_batched_tokens,
        ORDERS[asked.scheduling_policy](),
        asked.max_tokens_held,
    )
