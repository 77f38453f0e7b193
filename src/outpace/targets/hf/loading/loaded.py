"""A model that can be decoded, and what it says of itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from outpace.core.values import shown
from outpace.errors import ConfigError, UnsupportedModel, VocabularyMismatch
from outpace.targets.cpu.kernels import Kernels
from outpace.targets.cpu.weights.quantize import Quantization
from outpace.targets.hf.kinds import is_encoder_decoder, longest_text, placeholders, rope_entries
from outpace.targets.hf.plain import forward_mask
from outpace.targets.hf.recurrent.families import WITHOUT_CACHE
from outpace.targets.hf.weights import weight_bytes

GENERATION_CONFIG = "generation_config"
TOKENIZER = "the tokenizer's eos_token"
TEMPLATE = "the chat template"


@dataclass(frozen=True)
class End:
    """``str()`` gives the token with its sources.

    >>> str(End(2, "</s>", ("generation_config", "the chat template")))
    "'</s>' (generation_config, the chat template)"
    """

    token: int
    text: str
    """As the vocabulary writes it; its number without a tokenizer."""
    sources: tuple[str, ...]
    """Who names it: the model's generation_config, the tokenizer, the chat template; of a GGUF
    file, the field of the file, or its text by which it is known."""
    chats_only: bool = False
    """Whether it ends the answers of chats, and no other texts."""

    def __str__(self) -> str:
        chats = " in chats" if self.chats_only else ""
        return f"{self.text!r}{chats} ({', '.join(self.sources)})"


ANY_LENGTH = 1 << 20
"""The longest text of a model that has room for any."""


@dataclass(frozen=True)
class LoadedModel:
    """A causal LM that outpace can decode, its tokenizer if it has one, and what both say."""

    model: nn.Module
    tokenizer: Any
    name: str
    same_tokens: bool = False
    """Known to share the tokens of whatever it is used with."""
    quantization: Quantization | None = None
    """How its linear layers were quantised when it was loaded."""
    packed: bool = False
    """Whether its weights are in blocks, as a GGUF file holds them."""
    cpu_kernels: Kernels | None = None
    """How its linear layers were to be replaced when it was loaded; None: it was handed over."""
    processor: Any = None
    """What makes a vision-language model's inputs of texts and images, if it has one."""
    ends: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """The tokens that end a text by a GGUF file, with who names each of them."""
    lora: Path | None = None
    """The adapter that was merged into its weights when it was loaded."""
    num_mtp_modules: int = 0
    """Multi-token-prediction modules that its GGUF file brings."""

    @property
    def config(self) -> Any:
        """The text model's configuration."""
        config: Any = self.model.config
        return config.get_text_config()

    @property
    def placeholders(self) -> frozenset[int]:
        """The tokens that stand for images; none for a model that reads text only."""
        model: Any = self.model
        return placeholders(model.config)

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights."""
        return next(self.model.parameters()).dtype

    @property
    def max_length(self) -> int:
        """Tokens that the model has positions for; of an encoder-decoder, the decoder."""
        if is_encoder_decoder(self.model):
            return longest_text(self.model) or ANY_LENGTH
        return max_length_of(self.config)

    @cached_property  # tokenizers make the whole table anew each time: 10 ms
    def vocabulary(self) -> int:
        """Tokens that can be generated: heads are often padded beyond what the tokenizer knows."""
        size = int(self.config.vocab_size)
        if self.tokenizer is None:
            return size
        return min(size, int(max(self.tokenizer.get_vocab().values())) + 1)

    @property
    def _generation_config(self) -> Any:
        """The model's own; one that sets nothing where its owner has removed it."""
        empty: Any = GenerationConfig
        own: Any = self.model.generation_config
        return empty() if own is None else own

    @property
    def defaults(self) -> dict[str, Any]:
        """The model's generation_config as a dict of the options that it sets."""
        return dict(self._generation_config.to_diff_dict())

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        ids: Any = self._generation_config.eos_token_id
        if ids is None and self.tokenizer is not None:
            ids = self.tokenizer.eos_token_id
        if ids is None:
            return ()
        return (ids,) if isinstance(ids, int) else tuple(ids)

    def sources_of(self, end: int) -> Sequence[str]:
        """Returns who says that one of `eos_ids` ends a text."""
        named = self._generation_config.eos_token_id is not None
        return self.ends.get(end, (GENERATION_CONFIG if named else TOKENIZER,))

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return weight_bytes(self.model)


def max_length_of(config: Any) -> int:
    """Returns the tokens that a decoder has positions for, by its text model's configuration.

    Where longer texts have other rotary angles (LongRoPE), only those of the shorter ones: a batch
    would change what its rows have cached as soon as the longest of them got there. Where attention
    drops tokens from some length on (Doge), only texts up to that length. Models that only keep
    states have room for any text.
    """
    if config.model_type in WITHOUT_CACHE:
        return ANY_LENGTH  # RWKV's context_length is what one pass of a kernel takes
    top = int(getattr(config, "max_position_embeddings", None) or ANY_LENGTH)
    top = min(top, int(getattr(config, "keep_window_size", None) or top))
    kinds = rope_entries(config)
    first = [kind.get("original_max_position_embeddings") for kind in kinds]
    long = any(kind.get("rope_type") == "longrope" for kind in kinds)
    return min([top, *filter(None, first)]) if long else top


def check_model(model: Any) -> None:
    """Raises ``ConfigError`` for what a caller gives as a draft model and is none."""
    if not isinstance(model, (str, os.PathLike, nn.Module, LoadedModel)):
        raise ConfigError(
            f"model must be a draft model's folder, its hub name, or the loaded model, not "
            f"{shown(model)}."
        )


def check_tokenizer(tokenizer: Any) -> None:
    """Raises ``ConfigError`` for what a caller gives as a tokenizer and is none."""
    if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "get_vocab")):
        raise ConfigError(
            f"tokenizer must be a loaded tokenizer, not {shown(tokenizer)}: load it with "
            "transformers.AutoTokenizer.from_pretrained()."
        )


def check_same_vocabulary(target: LoadedModel, drafter: LoadedModel) -> None:
    """Raises ``VocabularyMismatch`` unless every token id means the same text in both models."""
    if drafter.same_tokens:
        return
    if target.tokenizer is None or drafter.tokenizer is None:
        ours, theirs = target.config.vocab_size, drafter.config.vocab_size
        if ours != theirs:
            raise VocabularyMismatch(
                f"the target has {ours} tokens and the drafter {theirs}, and without both "
                "tokenizers nothing tells that they agree: give the tokenizer of each, or use a "
                "drafter with the target's vocabulary."
            )
        return
    ours, theirs = target.tokenizer.get_vocab(), drafter.tokenizer.get_vocab()
    different = [token for token in theirs if ours.get(token, theirs[token]) != theirs[token]]
    unknown = [token for token in theirs if token not in ours]
    if different or len(unknown) > max(64, len(ours) // 100):
        example = (different or unknown)[0]
        raise VocabularyMismatch(
            f"drafter and target have different tokenizers: the target's has {len(ours)} tokens, "
            f"the drafter's {len(theirs)}, and {example!r} is {ours.get(example, 'absent')} in the "
            f"first and {theirs[example]} in the second; use a drafter trained with the target's "
            "tokenizer."
        )


LENGTH = 8
"""Tokens of the text. They are arbitrary ones, the same for every model of a vocabulary."""


@torch.no_grad()
def probe_states(loaded: LoadedModel) -> Tensor:
    """Returns the last hidden states ``[LENGTH - 1, H]`` in the fixed text, in float32 on the CPU.
    That at the first token is left out: many models have the same outsized one for any text."""
    model: Any = loaded.model
    if is_encoder_decoder(model):
        raise UnsupportedModel(
            f"{loaded.name} is an encoder-decoder, and classifiers learn from texts without a "
            "source: use a decoder-only model."
        )
    size = loaded.vocabulary
    tokens = [(7 + 31 * at) % size for at in range(LENGTH)]
    output = model(
        input_ids=torch.tensor([tokens], device=loaded.device),
        use_cache=False,
        output_hidden_states=True,
        **forward_mask(model, LENGTH),
    )
    states: Tensor = output.hidden_states[-1][0, 1:]
    return states.float().cpu()
