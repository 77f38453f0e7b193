"""Which encoder-decoders can be decoded speculatively: by name, and by trying.

What no configuration says is tried out by `probe`: two rows with sources of different lengths, a
tree and a chain through the slot cache, against plain passes of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core.trees.tree import Tree
from outpace.errors import UnsupportedModel
from outpace.targets.base import Source
from outpace.targets.hf.runner import Runner
from outpace.targets.hf.seq2seq.audio import FEATURES, heard_shape
from outpace.targets.hf.supported.comparing import (
    BRANCHES,
    COARSE,
    PARENTS,
    PENDING,
    PREFIX,
    distance,
    tolerance_in,
)
from outpace.targets.hf.supported.plainly import read_plainly, some_states, some_tokens

REFUSED = {
    "switch_transformers": "its experts drop tokens when many of a pass choose the same one",
    "nllb-moe": "its experts drop tokens when many of a pass choose the same one",
    "prophetnet": "its decoder predicts several tokens at once, with a state for each",
    "xlm-prophetnet": "its decoder predicts several tokens at once, with a state for each",
    "dia": "it writes nine channels of audio codes at once, and outpace writes one text",
    "fsmt": "its decoder takes a mask or a cache, and drafts need both",
    "t5gemma2": "its decoder sees source and text in one attention, where outpace keeps them apart",
    "udop": "its encoder reads where words stand on a page beside the words, and outpace gives it "
    "words only",
    "rag": "it looks documents up while it writes",
    "encoder-decoder": "it is made of two models that count positions each in its own way",
    "speech-encoder-decoder": "it is made of two models that count positions each in its own way",
    "vision-encoder-decoder": "it is made of two models that count positions each in its own way",
}
"""Types of models that cannot work, and why."""


def check_config(config: Any) -> None:
    """Raises ``UnsupportedModel`` where the configuration alone tells that it cannot work."""
    name = f"a model of type {config.model_type!r}"
    reason = REFUSED.get(config.model_type)
    if reason is not None:
        raise UnsupportedModel(
            f"{name} cannot be decoded speculatively, because {reason}: use another model."
        )
    own = getattr(config, "decoder_vocab_size", None)
    if own is not None and own != config.vocab_size:
        raise UnsupportedModel(
            f"{name} has {own} tokens in its decoder and {config.vocab_size} in its encoder: use a "
            "model in which they share one vocabulary."
        )
    types: Sequence[str] = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    if "sliding_attention" in types:
        raise UnsupportedModel(
            f"{name} cannot be decoded speculatively, because its decoder has sliding windows, and "
            "outpace knows no masks for windows beside a source: use another model."
        )


def check(model: nn.Module) -> None:
    """Raises ``UnsupportedModel`` where the encoder reads what outpace cannot give it."""
    loaded: Any = model
    reads: str = loaded.main_input_name
    if reads == "input_ids" or (reads == FEATURES and heard_shape(loaded.config) is not None):
        return
    raise UnsupportedModel(
        f"the encoder of {type(model).__name__} reads {reads!r} in a form of its own, and outpace "
        "gives encoders token ids or audio as Whisper hears it: use another model."
    )


# -- trying a model out ----------------------------------------------------------------------------

_SOURCES = (5, 3)
"""States of the sources of the two rows."""


def probe(model: nn.Module, coarse: bool = False) -> None:
    """Raises ``UnsupportedModel``, with the reason, unless drafts that are scored through the slot
    cache get the logits of plain passes over the same sources.

    coarse: the layers round, so that the last bit of an input may be seen in the output.
    """
    loaded: Any = model
    tolerance = COARSE if coarse else tolerance_in(loaded.dtype)
    cause: Exception | None = None
    try:
        reason = _fault(model, tolerance)
    except UnsupportedModel:
        raise
    except Exception as error:  # whatever stops a model in its own forward pass
        reason, cause = _why_it_fails(model), error
    if reason is not None:
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be decoded speculatively: {reason}. Use another model."
        ) from cause


@torch.inference_mode()
def _fault(model: nn.Module, tolerance: float) -> str | None:
    """Returns what is wrong with the logits that the model gives drafts, None if nothing is."""
    runner = Runner(model, rows=2, max_length=PREFIX + len(PARENTS))
    lengths = _SOURCES if runner.model.masks_sources else (_SOURCES[0],) * 2
    sources = [_source(model, length, row) for row, length in enumerate(lengths)]
    texts = [_tokens(model, PREFIX - row, first=3 + row) for row in range(2)]
    nodes = _tokens(model, len(PARENTS), first=9)
    expected = [_read_plainly(runner, *each, nodes) for each in zip(sources, texts, strict=True)]
    if not all(bool(logits.isfinite().all()) for logits in expected):
        return "its logits are NaN or infinite: its weights are damaged, or numbers overflow"
    scored = _score_as_draft(runner, sources, texts, nodes)
    off = max(distance(*pair) for pair in zip(scored, expected, strict=True))
    if off <= tolerance:
        return None
    return (
        "drafted tokens behind cached ones get other logits than the same tokens in a text: it "
        "ignores the mask or the positions that it is given"
    )


def _tokens(model: Any, count: int, first: int) -> list[int]:
    """A text without padding: M2M100 gives padding no position of its own, and then counts the
    tokens behind it otherwise with a cache than without."""
    padding = model.config.pad_token_id
    found = [token for token in some_tokens(model, count + 1, first) if token != padding]
    return found[:count]


def _source(model: nn.Module, length: int, seed: int) -> Source:
    """A source that the encoder might have read."""
    return Source(states=some_states(model, length, seed), encoder=model)


def _score_as_draft(
    runner: Runner,
    sources: Sequence[Source],
    texts: Sequence[Sequence[int]],
    nodes: Sequence[int],
) -> list[Tensor]:
    """Returns ``[P, V]`` for each row: the logits of the token before the root from a pass of its
    own, and those of the compared paths, the root before each.

    The rows have cached texts of different lengths.
    """
    for source in sources:
        runner.admit(1, source)
    runner.prefill(0, [text[:-PENDING] for text in texts])
    alone = runner.forward(_columns(runner, [[text[-PENDING]] for text in texts]), keep=1).logits
    tree = Tree.uniform(list(PARENTS), rows=len(texts), device=runner.device)
    fed = _columns(runner, [[*text[-PENDING:], *nodes] for text in texts])
    logits = runner.forward(fed, keep=1 + len(nodes), tree=tree).logits
    return [
        torch.cat([one, *(row[[0, *branch]] for branch in BRANCHES)]).double()
        for one, row in zip(alone, logits, strict=True)
    ]


def _columns(runner: Runner, tokens: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor([list(row) for row in tokens], device=runner.device)


def _read_plainly(
    runner: Runner, source: Source, text: Sequence[int], nodes: Sequence[int]
) -> Tensor:
    """Returns ``[P, V]``: the same from one plain pass for each path."""
    assert source.states is not None
    read: list[Tensor] = []
    for branch in BRANCHES:
        ids = _columns(runner, [[*text, *(nodes[node - 1] for node in branch)]])
        logits = runner.model.read(source.states[None], ids, use_cache=False).logits[0]
        if not read:
            read.append(logits[len(text) - PENDING, None])
        read.append(logits[-len(branch) - 1 :])
    return torch.cat(read).double()


def _why_it_fails(model: nn.Module) -> str:
    """Returns which of the things that a round needs makes the model raise an error."""
    try:
        read_plainly(model, _tokens(model, PREFIX, first=3))
    except Exception:  # the error that matters is the one that the caller has seen
        return (
            "its decoder cannot write from token ids and the states of its encoder alone (it needs "
            "another input)"
        )
    return "its decoder cannot read several drafted tokens behind cached ones"
