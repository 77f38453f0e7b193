"""A target that is a model of transformers: its cache and what it needs besides, in one runner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core.proposal import AuxTokens, Precomputed
from outpace.core.transfer import to_device
from outpace.core.trees.tree import Tree
from outpace.errors import ConfigError, UnsupportedModel
from outpace.targets.base import (
    KVCacheDtype,
    PrefillChunk,
    PromptInputs,
    ScoreInputs,
    Scores,
    SubLayers,
    Target,
)
from outpace.targets.cpu.threads import ThreadLimit
from outpace.targets.hf.cache import SlotCache
from outpace.targets.hf.device_map import is_multi_device
from outpace.targets.hf.fixed import FixedShapeConfig
from outpace.targets.hf.invariance import INVARIANT_COLUMNS, BatchInvariance
from outpace.targets.hf.kinds import is_encoder_decoder, placeholders, scale_of_embeddings
from outpace.targets.hf.lock import model_lock
from outpace.targets.hf.logits import LogitScaling
from outpace.targets.hf.partial.aux_tokens import AuxForward, aux_inputs, with_aux_tokens
from outpace.targets.hf.partial.parts import (
    LowerLayers,
    LowerLayersView,
    PartView,
    UpperLayers,
    WithoutSubLayers,
    pass_after,
)
from outpace.targets.hf.plain import forward_mask, quantizes_inputs
from outpace.targets.hf.prefixes import PrefixStore
from outpace.targets.hf.prompts import Prompts, RowPrompt, hidden_states_kwargs, hidden_states_of
from outpace.targets.hf.runner import PREFILL_CHUNK, Runner
from outpace.targets.hf.vision.images import Images
from outpace.targets.hf.weights import experts_in, experts_read, weight_bytes


class HFTarget(Target):
    """Rows of a transformers model.

    It is composed: the runner has the model, its cache and what the kind of model needs besides
    (recurrent states, sources of an encoder, fixed shapes). The target adds the images of prompts
    and batch invariance.

    >>> target = HFTarget(model, rows=2, max_length=64)     # doctest: +SKIP
    >>> target.admit(PromptInputs([3, 1, 4]))               # doctest: +SKIP
    0
    """

    def __init__(
        self,
        model: nn.Module,
        rows: int,
        max_length: int,
        fixed: FixedShapeConfig | None = None,
        saved: PrefixStore | None = None,
        invariant: bool = False,
        kv_cache_dtype: KVCacheDtype = "auto",
    ) -> None:
        """fixed: how passes of shapes that come again are run, if they are compiled or recorded.
        saved: where ended texts stay cached for texts that begin alike. invariant: a token's logits
        shall not depend on what else is in a pass; ``fixed`` is then unset where the model's own
        passes compute tokens alike. kv_cache_dtype: in what keys and values are held.

        Raises ``ConfigError`` for what the model cannot do.
        """
        self.model: Any = model
        self.max_rows, self.max_length = rows, max_length
        self._saved = PrefixStore(0) if saved is None else saved
        self.has_prefix_cache = self._saved.limit > 0
        shown = not is_encoder_decoder(model) and bool(placeholders(self.model.config))
        self._images = Images(model) if shown else None
        self._check_composition(invariant)
        self.invariance: BatchInvariance | None = None
        """How its passes are alike, if they shall be."""
        if invariant:
            self.invariance = BatchInvariance.of(model, rows, one_shape=fixed is not None)
            self.chains_only, self.max_nodes = fixed is not None, self.invariance.max_nodes
            fixed = None if fixed is None else replace(fixed, columns=INVARIANT_COLUMNS)
        self.kv_cache_dtype = kv_cache_dtype
        self.runner = Runner(model, rows, max_length, fixed, kv_cache_dtype)
        self.device, self.dtype = self.runner.device, self.runner.dtype
        self._scaling = LogitScaling.of(self.runner.config)
        self._prompts = Prompts(self.runner, fixed_pieces=invariant)
        self._scored: tuple[int, bool] = (0, True)  # pending tokens of the last pass; a chain?
        # By number of layers: the first ones, without norm and head, and those after them.
        self._halves: dict[int, tuple[LowerLayers, UpperLayers]] = {}
        self._aux_forward: AuxForward | None = None
        # With another number of threads torch adds up in another order.
        limited = self.device.type == "cpu" and not invariant
        self._limit = ThreadLimit() if limited else None

    def _check_composition(self, invariant: bool) -> None:
        """Raises ``ConfigError`` for parts that do not go together."""
        name, sources = type(self.model).__name__, is_encoder_decoder(self.model)
        if invariant and (sources or self._images is not None):
            raise ConfigError(
                f"{name} reads more than tokens, which passes of one shape cannot: leave "
                "batch_invariant out."
            )
        if invariant and is_multi_device(self.model):
            raise ConfigError(
                f"{name} lies on several devices, and the passes of batch_invariant are tried on "
                "one: leave batch_invariant or device_map out."
            )
        if sources and self.has_prefix_cache:
            raise ConfigError(
                f"{name} is an encoder-decoder, whose texts begin alike only where their sources "
                "are the same: leave enable_prefix_caching out."
            )

    def step_context(self) -> AbstractContextManager[None]:
        return nullcontext() if self._limit is None else self._limit

    # -- rows ----------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        return self.runner.active

    @property
    def num_ready_rows(self) -> int:
        return self._prompts.num_ready_rows

    @property
    def lengths(self) -> Sequence[int]:
        return self.runner.lengths

    def admit(self, inputs: PromptInputs) -> int:
        images = None if self._images is None else self._images.look(inputs)
        self.runner.admit(1, inputs.source)
        self._prompts.admit(RowPrompt(inputs.token_ids, images))
        row = self.num_rows - 1
        self.runner.keep_checkpoint(row, len(inputs.token_ids) - 1)
        if images is not None:
            self.runner.offsets[row] = images.offset
        elif inputs.max_cached_prefix and self.has_prefix_cache:
            # The last token stays pending.
            most = min(inputs.max_cached_prefix, len(inputs.token_ids) - 1)
            length, saved = self._saved.find(inputs.token_ids[:most])
            if length:
                self.runner.restore(row, saved, length)
        return row

    def fork(self, row: int, with_output: bool = False) -> int:
        if self.num_ready_rows < self.num_rows:
            raise AssertionError("a row is forked while prompts are being read")
        read = len(self._prompts[row].tokens) - 1
        self.runner.fork(row, self.lengths[row] if with_output else read)
        self._prompts.fork(row)
        return self.num_rows - 1

    def reset(self) -> None:
        self.runner.reset()
        self._prompts.retain([])
        self.forget_texts()

    def forget_texts(self) -> None:
        self._saved.clear()

    def retain(self, rows: Sequence[int], texts: Mapping[int, Sequence[int]] | None = None) -> None:
        for row, text in (texts or {}).items():
            length = min(self.lengths[row], len(text))
            shown = self._images is not None and self._images.shown_in(text)
            if self.has_prefix_cache and length and not shown and self._saved.takes(length):
                self._saved.add(text[:length], self.runner.save(row, length))
        self.runner.retain(rows)
        self._prompts.retain(rows)

    def prefill(
        self, token_budget: int, layers: frozenset[int] = frozenset(), full: bool = False
    ) -> list[PrefillChunk]:
        return self._prompts.prefill(token_budget, layers, full)

    # -- rounds --------------------------------------------------------------------------------

    def score(self, inputs: ScoreInputs) -> Scores:
        if self.invariance is not None:
            inputs = self.invariance.of_inputs(inputs)
        pending = to_device(inputs.pending, self.device)  # [B, P]
        tokens = torch.cat([pending, inputs.tokens], 1) if inputs.tree.size else pending
        self._scored = pending.shape[1], inputs.tree.is_chain
        if inputs.aux_tokens is not None:
            return self._score_with_aux(inputs, tokens, inputs.aux_tokens)
        if inputs.precomputed is not None and inputs.tree.is_chain and not inputs.layers:
            return self._score_precomputed(inputs, tokens, inputs.precomputed)
        output = self._pass(inputs, tokens, inputs.tree)
        return Scores(output.logits, hidden_states_of(output, inputs.layers))

    def _score_precomputed(
        self, inputs: ScoreInputs, tokens: Tensor, precomputed: Precomputed
    ) -> Scores:
        """Scores a chain whose first columns have been through the first layers already."""
        lower, upper = self._halves[precomputed.layers]
        states, rest = precomputed.hidden_states, tokens[:, precomputed.hidden_states.shape[1] :]
        if rest.shape[1]:
            pass_after(self.runner, states.shape[1], rest, 1, lower)
            states = torch.cat([states, lower.states], 1)
        through = partial(upper, states=states)
        output = self.runner.forward(tokens, keep=1 + inputs.tree.size, through=through)
        return Scores(output.logits)

    @torch.inference_mode()
    def _score_with_aux(self, inputs: ScoreInputs, tokens: Tensor, aux_tokens: AuxTokens) -> Scores:
        """Scores a draft and the auxiliary tokens after it in one pass."""
        if aux_tokens.entry_layer or aux_tokens.made is not None:
            self._check_layers("let drafts join it after one of its layers")
        columns, nodes = tokens.shape[1], 1 + inputs.tree.size
        with aux_inputs(self.model, tokens, nodes, aux_tokens) as (all_tokens, options):
            if aux_tokens.entry_layer:  # they change the model for this pass: it is run as it comes
                options["through"] = self.runner.model
            output = self._pass(
                inputs, all_tokens, with_aux_tokens(inputs.tree, aux_tokens), **options
            )
        states = hidden_states_of(output, inputs.layers, columns)
        return Scores(output.logits[:, :nodes], states, output.logits[:, nodes:])

    def _pass(self, inputs: ScoreInputs, tokens: Tensor, tree: Tree, **options: Any) -> Any:
        """The model's output, with the logits of the tree's nodes."""
        options |= hidden_states_kwargs(self.runner, inputs.layers)
        return self.runner.forward(tokens, keep=1 + tree.size, tree=tree, **options)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        pending, is_chain = self._scored
        if is_chain:
            self.runner.advance([pending + len(path) for path in paths])
        else:
            self.runner.advance_paths(pending, paths)
        self.runner.drop_checkpoints()

    # -- what it costs -------------------------------------------------------------------------

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self.model)

    @property
    def pass_bytes(self) -> int:
        return self.runner.pass_bytes

    @property
    def expert_bytes(self) -> tuple[float, float]:
        return experts_read(experts_in(self.model))

    @property
    def lm_head_bytes(self) -> int:
        return self.runner.lm_head_bytes

    @property
    def cache_bytes(self) -> int:
        return self.runner.nbytes + self._saved.nbytes

    @property
    def compile_seconds(self) -> float:
        return self.runner.compile_seconds

    # -- capabilities --------------------------------------------------------------------------

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.runner.model.get_input_embeddings()(tokens)
        return found

    @property
    def embedding_scale(self) -> float:
        return scale_of_embeddings(self.runner.model.get_input_embeddings())

    @torch.inference_mode()
    def compute_logits(self, states: Tensor) -> Tensor:
        if self.runner.sources is not None:
            logits: Tensor = self.runner.sources.decoder.compute_logits(states)
            return logits
        products = self.model.get_output_embeddings()(states.to(self.dtype))
        return self._scaling(products.to(self.device))  # it may lie on another device

    def apply_soft_cap(self, logits: Tensor) -> Tensor:
        return self._scaling.apply_soft_cap(logits)

    def _check_layers(self, what: str) -> None:
        """Raises ``UnsupportedModel`` for a model whose layers are not taken apart."""
        if self.runner.sources is not None:
            raise UnsupportedModel(
                f"{type(self.model).__name__} is an encoder-decoder, and outpace cannot {what}: "
                "draft with a look-up or with another model."
            )

    @property
    def kv_layers(self) -> Mapping[str, int]:
        config, runner = self.runner.config, self.runner
        if runner.sources is not None or type(runner.cache) is not SlotCache:
            return {}
        count = config.num_hidden_layers
        types = list(getattr(config, "layer_types", None) or ["full_attention"] * count)
        own = count - (getattr(config, "num_kv_shared_layers", None) or 0)
        return {kind: layer for layer, kind in enumerate(types[:own])}

    @torch.inference_mode()
    def key_values(self, types: Iterable[str]) -> Mapping[str, tuple[Tensor, Tensor]]:
        layers = {kind: self.runner.cache.layers[self.kv_layers[kind]] for kind in types}
        slots = self.runner.cached_slots(self.num_ready_rows)
        found = {kind: layer.shown(slots.on(layer.keys.device)) for kind, layer in layers.items()}
        return {kind: (k.to(self.device), v.to(self.device)) for kind, (k, v) in found.items()}

    def view(self, skipped: SubLayers) -> PartView:
        self._check_layers("leave out some of its layers")
        part = WithoutSubLayers(self.model, skipped)
        return PartView(self.runner, lambda: self.num_ready_rows, part)

    def early_exit(self, layers: int) -> LowerLayersView:
        self._check_layers("stop after some of its layers")
        lower = LowerLayers(self.model, layers)
        rest = LowerLayers(self.model, layers, stops=True)
        self._halves[layers] = rest, UpperLayers(self.model, layers)
        return LowerLayersView(self.runner, lambda: self.num_ready_rows, lower)

    @torch.inference_mode()
    def forward_uncached(self, token_ids: Sequence[int], last: int | None = None) -> Tensor:
        if self.runner.sources is not None:
            raise UnsupportedModel(
                f"{type(self.model).__name__} is an encoder-decoder: it reads no text without a "
                "source."
            )
        if self._images is not None and not self._images.is_causal_by_default:
            return super().forward_uncached(token_ids, last)
        ids = torch.tensor([list(token_ids)], device=self.device)
        if quantizes_inputs(self.model) or self.kv_cache_dtype != "auto":
            return self._plain_through_slots(ids, last or len(token_ids))
        wanted: dict[str, Any] = forward_mask(self.model, len(token_ids))
        if last is not None:
            wanted["logits_to_keep"] = last
        with model_lock(self.model):
            logits: Tensor = self.model(input_ids=ids, use_cache=False, **wanted).logits
        return logits[0, -(last or 0) :]  # some models give the logits of all tokens

    def _plain_through_slots(self, ids: Tensor, last: int) -> Tensor:
        """``[last, V]`` after the last of a text's tokens ``[1, T]``, read as a chain without a
        draft into a cache of its own: where attention reads what the cache has rounded, and where
        our own code rounds the inputs of products, since transformers' attention adds up in another
        order, which decides now and then how one is rounded."""
        runner = Runner(self.model, 1, self.max_length, kv_cache_dtype=self.kv_cache_dtype)
        found = []
        runner.admit(1)
        after = ids.shape[1]
        for piece in torch.split(ids, PREFILL_CHUNK, 1):
            after -= piece.shape[1]
            keep = min(piece.shape[1], max(1, last - after))
            logits = runner.forward(piece, keep, num_committed=piece.shape[1] - 1).logits
            found.append(logits[0])
            runner.advance([piece.shape[1]])
        return torch.cat(found)[-last:]

    def forward_aux(self, token_ids: Sequence[int], aux_tokens: AuxTokens) -> Tensor:
        self._check_layers("try auxiliary tokens of a trained head in it")
        if self._aux_forward is None:
            self._aux_forward = AuxForward(self.model, self.max_length)
        ids = torch.tensor([list(token_ids)], device=self.device)
        with torch.inference_mode():
            return self._aux_forward(ids, aux_tokens)[0]

    def new_target(self, rows: int) -> HFTarget:
        return HFTarget(self.model, rows, self.max_length, kv_cache_dtype=self.kv_cache_dtype)
