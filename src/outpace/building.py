"""From the arguments of ``LLM`` to its engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import nn

from outpace import arguments
from outpace.config import SpeculativeConfig
from outpace.core.progress import Progress, silent
from outpace.core.values import flag_or
from outpace.draft.base import Drafter, Setup
from outpace.draft.registry import find_drafter
from outpace.engine.capture import AsTheyCome, capture_for
from outpace.engine.engine import Engine
from outpace.engine.order.registry import ORDERS
from outpace.engine.verifier import Verifier
from outpace.errors import ConfigError
from outpace.intake import Intake
from outpace.invariance import check_invariant
from outpace.policy.lengths.registry import length_options
from outpace.policy.making import make_controller
from outpace.targets.cpu.kernels import Kernels
from outpace.targets.hf.fixed import FixedShapes
from outpace.targets.hf.invariance import tokens_alike
from outpace.targets.hf.kinds import is_encoder_decoder
from outpace.targets.hf.loading.loaded import Loaded
from outpace.targets.hf.prefixes import SavedTexts
from outpace.targets.hf.target import HFTarget
from outpace.train.teacher import origin_of
from outpace.verify.base import Rule
from outpace.verify.registry import make_rule

LOGGER = logging.getLogger("outpace")

CONVERSATIONS = 4
"""Conversations of which the target keeps what is cached, unless it is said how many texts."""


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
    """The other arguments of `LLM` that its engine is built from; ``ConfigError`` for a bad one."""

    cpu_kernels: Kernels
    compile: bool | Literal["auto"]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_batch_total_tokens: int | None
    scheduling_policy: str
    enable_prefix_caching: bool | None
    batch_invariant: bool

    def __post_init__(self) -> None:
        flag_or("auto", "compile", self.compile, error=ConfigError)
        arguments.check_flags(batch_invariant=self.batch_invariant)
        if self.enable_prefix_caching is not None:
            arguments.check_flags(enable_prefix_caching=self.enable_prefix_caching)
        arguments.check_choice("scheduling_policy", self.scheduling_policy, ORDERS)
        for name, read in (
            ("max_num_seqs", arguments.rows),
            ("max_num_batched_tokens", arguments.tokens),
            ("max_batch_total_tokens", arguments.tokens_or_none),
        ):
            object.__setattr__(self, name, read(name, getattr(self, name)))  # numpy's as well

    def capture(self, device: torch.device) -> Callable[[nn.Module], FixedShapes] | None:
        """Returns how the passes of models on a device are compiled or recorded, None where they
        are played as they come. To record one takes some milliseconds, to compile one many
        seconds: by itself only a GPU does either."""
        if self.compile == "auto":
            return partial(capture_for, required=False) if device.type == "cuda" else None
        return capture_for if self.compile else None

    def check_held(self, context: int) -> None:
        """Raises ``ConfigError`` where all rows together may not hold one longest text."""
        arguments.check_held(self.max_batch_total_tokens, context)

    @property
    def reads_again(self) -> list[str]:
        """The arguments that were given and may have a text read again."""
        given = {
            "enable_prefix_caching": bool(self.enable_prefix_caching),
            "max_batch_total_tokens": self.max_batch_total_tokens is not None,
        }
        return [name for name, is_given in given.items() if is_given]

    @property
    def saved_texts(self) -> int:
        """How many texts the target keeps cached when they have ended."""
        if self.enable_prefix_caching is None:
            return min(CONVERSATIONS, self.max_num_seqs)
        return self.max_num_seqs if self.enable_prefix_caching else 0

    @property
    def saved_by_drafter(self) -> int | None:
        """How many a draft model keeps; None for the beginnings of a few."""
        return None if self.enable_prefix_caching is None else self.saved_texts


def build_engine(
    loaded: Loaded,
    speculation: Speculation,
    intake: Intake,
    asked: EngineOptions,
    progress: Progress = silent,
) -> Engine:
    """Returns the engine of a loaded model. Loads the draft model or the head, if there is one.
    progress: of that.

    Raises ``ConfigError`` for what does not go with this model.
    """
    asked.check_held(intake.max_length)
    capture = asked.capture(loaded.device)
    by_itself = asked.enable_prefix_caching is None  # then only where it can be done
    saved_texts, saved_tokens = asked.saved_texts, asked.max_batch_total_tokens
    if by_itself:
        saved_texts = 0 if is_encoder_decoder(loaded.model) else saved_texts
        saved_tokens = saved_tokens or intake.max_length
    fixed = None if capture is None else capture(loaded.model)
    if asked.batch_invariant and fixed is None and not tokens_alike(loaded.model):
        fixed = FixedShapes(loaded.model, AsTheyCome(), pads=True)
    target = HFTarget(
        loaded.model,
        rows=asked.max_num_seqs,
        max_length=intake.max_length,
        fixed=fixed,
        saved=SavedTexts(saved_texts, saved_tokens),
        invariant=asked.batch_invariant,
    )
    setup = Setup(
        loaded=loaded,
        target=target,
        rows=asked.max_num_seqs,
        max_length=intake.max_length,
        options=speculation.options,
        capture=capture,
        cpu_kernels=asked.cpu_kernels,
        saved_texts=asked.saved_by_drafter,
        saved_tokens=asked.max_batch_total_tokens,
        progress=progress,
    )
    progress(f"loading what drafts ({speculation.config.method})", 0.0)
    speculation.rule.recognise(lambda: origin_of(loaded))
    verifier = Verifier(speculation.rule, intake.second_text(speculation.rule))
    drafter = speculation.drafter.build(setup)
    if drafter.needs.states:  # of every token of a prompt, so that none may be read beforehand
        target.reuses = False
        if asked.enable_prefix_caching:
            LOGGER.warning(
                "outpace: enable_prefix_caching does nothing with method %r, which needs the "
                "target's states of all tokens of a prompt.",
                speculation.config.method,
            )
    if target.invariance is not None:
        if by_itself and not target.invariance.rereads:
            target.reuses = False
        count = speculation.config.num_speculative_tokens
        rule, text = verifier.rule, verifier.second_text
        check_invariant(target, drafter, rule, text, count, asked.reads_again)
    return Engine(
        target,
        drafter,
        verifier,
        make_controller(speculation.config, drafter, verifier.coupled, target),
        loaded.vocabulary,
        max_batched_tokens=asked.max_num_batched_tokens,
        order=ORDERS[asked.scheduling_policy](),
        max_tokens_held=asked.max_batch_total_tokens,
    )
