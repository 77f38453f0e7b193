"""A target that is a transformers encoder-decoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from outpace.core.proposal import AuxTokens
from outpace.errors import UnsupportedModel
from outpace.targets.base import Plan, ReadPart, Scores, SubLayers
from outpace.targets.hf.fixed import FixedShapes
from outpace.targets.hf.partial.view import LowerLayersView, PartView
from outpace.targets.hf.runner import Runner
from outpace.targets.hf.seq2seq.runner import DecoderRunner
from outpace.targets.hf.target import HFTarget
from outpace.targets.hf.turns import TURNS


class Seq2SeqTarget(HFTarget):
    """Rows of a decoder, each with a source that the encoder has read once.

    A row's tokens are the decoder's: those that it starts with, and what it writes.
    """

    runner: DecoderRunner

    def _runner(self, model: nn.Module, fixed: FixedShapes | None) -> Runner:
        return DecoderRunner(model, self.rows, self.max_length, fixed)

    def fill(
        self, token_budget: int, layers: frozenset[int] = frozenset(), whole: bool = False
    ) -> list[ReadPart]:
        """As `Target.fill`. The tokens of sources count as those of prompts do."""
        spent = self.runner.encode(self._ready, token_budget)
        return super().fill(max(1, token_budget - spent), layers, whole)

    @property
    def _readable(self) -> int:
        return self.runner.encoded

    def _fit_the_first_pass(self, token_budget: int) -> bool:
        return self._readable == self.active and super()._fit_the_first_pass(token_budget)

    # -- capabilities --------------------------------------------------------------------------

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.model.get_decoder().get_input_embeddings()(tokens)
        return found

    @torch.inference_mode()
    def head(self, states: Tensor) -> Tensor:
        scale = getattr(self.model.config, "scale_decoder_outputs", False)
        scaled = states * self.model.model_dim**-0.5 if scale else states
        with TURNS.of(self.model):  # a pass may have hooked it, to let it see the last columns only
            logits: Tensor = self.model.get_output_embeddings()(scaled)
        bias = getattr(self.model, "final_logits_bias", None)
        return logits if bias is None else logits + bias

    def _score_with_aux(self, plan: Plan, tokens: Tensor, aux_tokens: AuxTokens) -> Scores:
        if aux_tokens.enter or aux_tokens.made is not None:
            raise self._without_layers("let drafts join it behind one of its layers")
        return super()._score_with_aux(plan, tokens, aux_tokens)

    def view(self, skipped: SubLayers) -> PartView:
        raise self._without_layers("leave out some of its layers")

    def lower(self, layers: int) -> LowerLayersView:
        raise self._without_layers("stop after some of its layers")

    def _without_layers(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{type(self.model).__name__} is an encoder-decoder, and outpace cannot {what}: draft "
            "with a look-up or with another model."
        )

    def plain(self, token_ids: Sequence[int], last: int | None = None) -> Tensor:
        raise UnsupportedModel(
            f"{type(self.model).__name__} is an encoder-decoder: it reads no text without a source."
        )

    def carry(self, token_ids: Sequence[int], aux_tokens: AuxTokens) -> Tensor:
        raise self._without_layers("try auxiliary tokens of a trained head in it")

    def another(self, rows: int) -> Seq2SeqTarget:
        return Seq2SeqTarget(self.model, rows, self.max_length)
