"""From the arguments of ``LLM`` to its engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from outpace.arguments import EngineArgs
from outpace.config import SpeculativeConfig
from outpace.core.progress import Progress, silent
from outpace.draft.base import Drafter, Setup
from outpace.draft.registry import find_drafter
from outpace.engine.capture import EagerRunner, capture_for
from outpace.engine.engine import Engine
from outpace.engine.scheduling_policies import SCHEDULING_POLICIES
from outpace.engine.verifier import Verifier
from outpace.errors import ConfigError, IncompatibleRule
from outpace.input_processor import InputProcessor
from outpace.methods.choosers.base import CompositeDrafter
from outpace.policy.lengths.registry import length_options
from outpace.policy.making import make_controller
from outpace.targets.base import Target
from outpace.targets.hf.fixed import FixedShapeConfig
from outpace.targets.hf.invariance import max_invariant_tokens
from outpace.targets.hf.kinds import is_encoder_decoder
from outpace.targets.hf.loading.load import load
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.loading.source import check_path
from outpace.targets.hf.nextn import last_norm
from outpace.targets.hf.prefixes import PrefixStore
from outpace.targets.hf.target import HFTarget
from outpace.targets.parallel.leader import Leader
from outpace.targets.parallel.load import SplitModel, check_options, load_split
from outpace.train.teacher import signature_of
from outpace.verify.base import Rule
from outpace.verify.registry import make_rule

LOGGER = logging.getLogger("outpace")


@dataclass(frozen=True)
class Speculation:
    """Who drafts and who verifies, with checked options."""

    config: SpeculativeConfig
    drafter: type[Drafter]
    options: Any
    """An instance of ``drafter.Options``."""
    rule: Rule
    length: Any
    """An instance of the length policy's ``Options``, if one is named."""

    @classmethod
    def of(cls, config: SpeculativeConfig) -> Self:
        """Returns what a configuration asks for; ``ConfigError`` where it makes no sense. Nothing
        is loaded."""
        drafter = find_drafter(config.method)
        options = drafter.configure(config.options)
        rule = make_rule(
            config.rule_name or drafter.default_rule_for(options), **config.rule_options
        )
        named = config.length_name
        length = None if named is None else length_options(named, config.length_options)
        return cls(config, drafter, options, rule, length)

    def for_target(self, loaded: LoadedModel) -> Speculation:
        """Returns the same for a target that is loaded: what it brings itself may draft."""
        named = self.config.rule_name is not None

        def verified(drafter: type[Drafter]) -> bool:
            try:
                for drawn in drafter.sampling_kinds if named else ():
                    self.rule.check(drawn, drafter.trees)
            except IncompatibleRule:
                return False
            return True

        options = self.drafter.for_target(self.options, loaded, verified)
        if options is self.options:
            return self
        rule = self.rule if named else make_rule(self.drafter.default_rule_for(options))
        return replace(self, options=options, rule=rule)


def capture_of(
    args: EngineArgs, device: torch.device
) -> Callable[[nn.Module], FixedShapeConfig | None] | None:
    """Returns how the passes of models on a device are compiled or recorded, None where they are
    run as they come. To record one takes some milliseconds, to compile one many seconds: by itself
    only a GPU does either."""
    if args.compile == "auto":
        return partial(capture_for, required=False) if device.type == "cuda" else None
    return capture_for if args.compile else None


def load_target(
    model: str | os.PathLike[str] | nn.Module | LoadedModel,
    args: EngineArgs,
    progress: Progress | None,
    check_length: Callable[[int], None],
) -> LoadedModel:
    """Returns the target that the arguments ask for; ``ModelLoadError`` for a folder or a file that
    is not there. check_length: is called with the model's longest text, once that is known."""
    if isinstance(model, (str, os.PathLike)):
        check_path(model)
    if args.tensor_parallel_size == 1 and not isinstance(model, SplitModel):
        return load(
            model,
            tokenizer=args.tokenizer,
            processor=args.processor,
            dtype=args.dtype,
            device=args.device,
            device_map=args.device_map,
            trust_remote_code=args.trust_remote_code,
            cpu_kernels=args.cpu_kernels,
            quantization=args.quantization,
            lora=args.lora,
            progress=progress,
            compiled=args.compile is True,
            check_length=check_length,
        )
    check_options(
        quantization=args.quantization,
        lora=args.lora,
        processor=args.processor,
        cpu_kernels=args.cpu_kernels,
        compiled=args.compile is True,
        batch_invariant=args.batch_invariant,
        device_map=args.device_map,
    )
    if isinstance(model, SplitModel):
        count = model.processes.count
        if args.tensor_parallel_size not in (1, count):
            raise ConfigError(
                f"tensor_parallel_size is {args.tensor_parallel_size}, and this model is split "
                f"over {count} processes already: leave it out."
            )
        return load(model, tokenizer=args.tokenizer, dtype=args.dtype, device=args.device)
    if isinstance(model, (nn.Module, LoadedModel)):
        raise ConfigError(
            "a model that you loaded is whole in this process, and is not split over others: give "
            "its path or hub name, or leave tensor_parallel_size out."
        )
    return load_split(
        os.fspath(model),
        args.tensor_parallel_size,
        tokenizer=args.tokenizer,
        dtype=args.dtype,
        device=args.device,
        trust_remote_code=args.trust_remote_code,
        threads=args.threads,
        progress=progress,
        check_length=check_length,
    )


def build_engine(
    loaded: LoadedModel,
    speculation: Speculation,
    input_processor: InputProcessor,
    args: EngineArgs,
    progress: Progress = silent,
) -> Engine:
    """Returns the engine of a loaded model. Loads the draft model or the head, if there is one.
    progress: of that.

    Raises ``ConfigError`` for what does not go with this model.
    """
    speculation = speculation.for_target(loaded)
    capture = capture_of(args, loaded.device)
    by_itself = args.enable_prefix_caching is None  # then only where it can be done
    saved_texts, saved_tokens = args.saved_texts, args.max_batch_total_tokens
    if args.enable_prefix_caching is not True and is_encoder_decoder(loaded.model):
        saved_texts = 0
    if by_itself:
        saved_tokens = saved_tokens or input_processor.max_length
    target = _target(loaded, input_processor.max_length, args, (saved_texts, saved_tokens))
    setup = Setup(
        loaded=loaded,
        target=target,
        rows=args.max_num_seqs,
        max_length=input_processor.max_length,
        options=speculation.options,
        capture=capture,
        cpu_kernels=args.cpu_kernels,
        saved_texts=args.saved_by_drafter,
        saved_tokens=args.max_batch_total_tokens,
        progress=progress,
    )
    progress(f"loading what drafts ({speculation.config.method})", 0.0)
    speculation.rule.check_target(lambda: signature_of(loaded))
    verifier = Verifier(speculation.rule, input_processor.second_copy_token_ids(speculation.rule))
    drafter = speculation.drafter.build(setup)
    if getattr(loaded.config, "num_hidden_layers", None) in drafter.needs.hidden_layers:
        check_last_layer(loaded, args)
    if drafter.needs.hidden_layers and not drafter.capabilities.copies_prompts:
        target.has_prefix_cache = False  # it has to be given the states of every token of a prompt
        if args.enable_prefix_caching is True:
            LOGGER.warning(
                "outpace: enable_prefix_caching does nothing with method %r, which needs the "
                "target's states of all tokens of a prompt.",
                speculation.config.method,
            )
    if isinstance(target, HFTarget) and target.invariance is not None:
        if by_itself and not target.invariance.rereads:
            target.has_prefix_cache = False
        count = speculation.config.num_speculative_tokens
        rule, text = verifier.rule, verifier.second_copy_token_ids
        check_invariant(target, drafter, rule, text, count, args.reads_again)
    return Engine(
        target,
        drafter,
        verifier,
        make_controller(speculation.config, speculation.length, drafter, target),
        loaded.vocabulary,
        max_batched_tokens=args.max_num_batched_tokens,
        scheduling_policy=SCHEDULING_POLICIES[args.scheduling_policy](),
        max_tokens_held=args.max_batch_total_tokens,
    )


def _target(
    loaded: LoadedModel, max_length: int, args: EngineArgs, saved: tuple[int, int | None]
) -> Target:
    """Returns the target of a loaded model. saved: the arguments of its `PrefixStore`."""
    if isinstance(loaded, SplitModel):
        return Leader(loaded, args.max_num_seqs, max_length, saved, args.kv_cache_dtype)
    capture = capture_of(args, loaded.device)
    fixed = None if capture is None else capture(loaded.model)
    if args.batch_invariant and fixed is None and not max_invariant_tokens(loaded.model):
        fixed = FixedShapeConfig(loaded.model, EagerRunner(), pads=True)
    return HFTarget(
        loaded.model,
        rows=args.max_num_seqs,
        max_length=max_length,
        fixed=fixed,
        saved=PrefixStore(*saved),
        invariant=args.batch_invariant,
        kv_cache_dtype=args.kv_cache_dtype,
    )


def check_last_layer(loaded: LoadedModel, args: EngineArgs) -> None:
    """Raises ``UnsupportedModel`` for a target that does not show what its last layer puts out
    before the norm after it, and ``ConfigError`` for what does not go with passes that do."""
    model: Any = loaded.model
    last_norm(model.get_decoder())
    given = [name for name in ("batch_invariant", "compile") if getattr(args, name) is True]
    if given:
        raise ConfigError(
            "the head reads what the last layer puts out before the norm after it, in passes that "
            f"transformers runs as they come: use another head, or leave {given[0]} out."
        )


# -- what does not go with batch_invariant, refused when an engine is built --------------------

REMEDIES = {
    "enable_prefix_caching": "leave enable_prefix_caching or batch_invariant out",
    "max_batch_total_tokens": "leave max_batch_total_tokens or batch_invariant out",
}
"""By the arguments of ``LLM`` that may have a text read again."""


def check_invariant(
    target: HFTarget,
    drafter: Drafter,
    rule: Rule,
    second_copy_token_ids: Sequence[int],
    count: int | str,
    read_again: list[str],
) -> None:
    """Raises ``ConfigError`` for what would make passes of a target differ in more than what is in
    them, and lets the target score no more nodes than there is room for with other columns.

    second_copy_token_ids: as `Verifier` has them.
    count: the drafted tokens that were asked for. read_again: the names of those arguments of
    ``LLM`` that were given and may have a text read again.
    """
    alike = target.invariance
    assert alike is not None
    if read_again and not alike.rereads:
        raise ConfigError(
            "a text that is read again would be computed in passes of another shape than those "
            f"that wrote it: {REMEDIES[read_again[0]]}."
        )
    if target.chains_only:
        _check_columns(drafter, rule)
    elif drafter.max_draft_tokens:
        _leave_room(
            target, alike.tokens, lambda n: _columns(n, drafter, rule, second_copy_token_ids)
        )
    room = alike.tokens // 2 if drafter.max_draft_tokens else alike.tokens
    if target.max_rows > room:
        raise ConfigError(
            f"under batch_invariant a pass has room for {alike.tokens} tokens here, which is too "
            f"few for {target.max_rows} texts at once: lower max_num_seqs to {room} or less."
        )
    most, shape = target.max_nodes, drafter.shape
    nodes = max(0 if isinstance(count, str) else count, 0 if shape is None else shape.size)
    if nodes > most:
        raise ConfigError(
            f"under batch_invariant a pass scores {most} drafted tokens of a text at most here, "
            f"not {nodes}: draft fewer{_fewer_rows(target, alike.tokens, nodes)}."
        )


def _leave_room(target: HFTarget, tokens: int, columns: Callable[[int], int]) -> None:
    """Lets a target score no more nodes than a pass has room for with other columns.
    tokens: of a pass, at most. columns: those that a row takes with n nodes."""
    least = columns(1)
    if least * target.max_rows > tokens and least > 2:
        fewer = tokens // least
        remedy = f"lower max_num_seqs to {fewer} or less" if fewer else "leave batch_invariant out"
        raise ConfigError(
            f"under batch_invariant a pass has room for {tokens} tokens here, and each text "
            f"takes {least} with one drafted token and what is scored with it: {remedy}."
        )
    while target.max_nodes > 1 and columns(target.max_nodes) * target.max_rows > tokens:
        target.max_nodes -= 1


def _columns(nodes: int, drafter: Drafter, rule: Rule, second_copy_token_ids: Sequence[int]) -> int:
    """Columns of a pass that a row with n nodes takes, with those that ride and, for a rule
    that has the draft scored twice, with the second copy."""
    if rule.needs.second_copy_prompt is not None:
        return 1 + 2 * nodes + len(second_copy_token_ids)
    per_row, per_node = _aux_tokens(drafter)
    return per_row + (1 + nodes) * (1 + per_node)


def _aux_tokens(drafter: Drafter) -> tuple[int, int]:
    """Columns that ride in a row, and those after the root and each node, at most."""
    children = drafter.children if isinstance(drafter, CompositeDrafter) else []
    found = [(drafter.aux_per_row, drafter.aux_per_node), *map(_aux_tokens, children)]
    return max(row for row, _ in found), max(node for _, node in found)


def _fewer_rows(target: HFTarget, tokens: int, nodes: int) -> str:
    """What else would help, as the end of a sentence."""
    rows = tokens // (nodes + 1)
    return f", or lower max_num_seqs to {rows}" if rows and not target.chains_only else ""


def _check_columns(drafter: Drafter, rule: Rule) -> None:
    """Refuses what lays other columns into a pass than a chain's."""
    children = drafter.children if isinstance(drafter, CompositeDrafter) else []
    for child in children:
        _check_columns(child, rule)
    reason = None
    if drafter.capabilities.uses_aux_tokens:
        reason = f"method={drafter.name!r} has columns of its own in the target's passes"
    elif drafter.trees and not (children or drafter.capabilities.any_shape):
        reason = f"method={drafter.name!r} drafts trees here, whose tokens lie apart in the cache"
    elif rule.needs.second_copy_prompt is not None:
        reason = f"verify={rule.name!r} has the draft scored twice"
    if reason is not None:
        raise ConfigError(
            f"{reason}, and the passes of batch_invariant score chains only: choose another one, "
            "or leave batch_invariant out."
        )
