"""Which models can be decoded speculatively: refused by name at load, with the reason."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from outpace.core.tree import Tree
from outpace.core.values import is_whole, shown
from outpace.errors import UnsupportedModel
from outpace.targets.hf.attention import BOOLEAN
from outpace.targets.hf.runner import Runner

RECURRENT = frozenset({"linear_attention", "conv", "mamba", "recurrent", "hybrid", "moe_mamba"})
RECURRENT_MODELS = frozenset(
    {"mamba", "mamba2", "rwkv", "falcon_mamba", "xlstm", "recurrent_gemma"}
)
ALIBI = frozenset({"bloom", "mpt"})
WINDOWED = frozenset({"full_attention", "sliding_attention"})
MASKABLE = BOOLEAN | {"eager"}


def check_config(config: Any) -> None:
    """Raises ``UnsupportedModel`` where the configuration already tells that it cannot work."""
    text: Any = config.get_text_config()
    name = f"a model of type {config.model_type!r}"
    layers = getattr(text, "num_hidden_layers", None)
    if layers is not None and not (is_whole(layers) and layers > 0):
        raise UnsupportedModel(
            f"{name} has {shown(layers)} layers by its config.json (num_hidden_layers): download "
            "or save the model again."
        )
    layer_types = set(getattr(text, "layer_types", None) or ())
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{name} is an encoder-decoder: use a decoder-only causal language model."
        )
    if layer_types & RECURRENT or config.model_type in RECURRENT_MODELS:
        raise UnsupportedModel(
            f"{name} keeps a recurrent state, which cannot be rolled back to an earlier token: use "
            "a model whose layers are all attention."
        )
    if layer_types - WINDOWED:
        raise UnsupportedModel(
            f"{name} has layers of type {sorted(layer_types - WINDOWED)}, for which no mask of "
            "drafted tokens is known: use a model with full or sliding attention."
        )
    if "local" in (getattr(text, "attention_layers", None) or ()):
        raise UnsupportedModel(
            f"{name} has local attention layers, whose windows count slots from the end of a pass: "
            "use a model with full or sliding attention."
        )
    if config.model_type in ALIBI or getattr(text, "alibi", False):
        raise UnsupportedModel(
            f"{name} encodes positions as ALiBi biases over slots, not as position_ids: use a "
            "model with rotary or learned positions."
        )


def check(model: nn.Module) -> None:
    """Raises ``UnsupportedModel`` where configuration or class tell that the model cannot work."""
    check_config(model.config)
    name = type(model).__name__
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModel(
            f"{name} keeps a recurrent state, which cannot be rolled back to an earlier token: use "
            "a model whose layers are all attention."
        )
    config: Any = model.config
    attention = config.get_text_config()._attn_implementation
    if attention not in MASKABLE:
        raise UnsupportedModel(
            f"{name} runs {attention!r} attention, which takes no mask of drafted tokens: load it "
            "with attn_implementation='sdpa'."
        )


def probe(model: nn.Module, coarse: bool = False) -> None:
    """Raises ``UnsupportedModel`` unless a draft scored through the slot cache gives what plain
    forwards give.

    What no configuration tells (a model that ignores its mask or its positions, silently) shows in
    the logits: nodes of a tree after a cached prefix are compared with their plain sequences. The
    tree is wide, so that the last of many siblings stands far from where its column would put it.
    coarse: the layers round, so that the last bit of an input may be seen in the output.
    """
    config: Any = model.config
    vocabulary = config.get_text_config().vocab_size
    prefix = [index % vocabulary for index in (3, 1, 4, 1, 5)]
    nodes = [(9 + 7 * index) % vocabulary for index in range(len(_PARENTS))]
    runner = Runner(model, rows=1, max_length=16)
    runner.admit(1)
    try:
        runner.prefill(0, [prefix[:-1]])
        tree = Tree.uniform(_PARENTS, rows=1, device=runner.device)
        tokens = torch.tensor([[prefix[-1], *nodes]], device=runner.device)
        logits = runner.forward(tokens, keep=tokens.shape[1], tree=tree).logits[0]
        scored = torch.stack([logits[path[-1]].double() for path in _PATHS])
        read = [[*prefix, *(nodes[node - 1] for node in path if node)] for path in _PATHS]
        expected = torch.stack([_plain(model, runner, ids) for ids in read])
    except Exception as error:  # whatever stops a model in its own forward pass
        raise UnsupportedModel(
            f"{type(model).__name__} fails on a draft of some tokens "
            f"({type(error).__name__}: {error}): it cannot be decoded speculatively."
        ) from error
    spread = expected.std(-1).clamp(min=1e-12)
    worst = float(((scored - expected).square().mean(-1).sqrt() / spread).max())
    if not worst <= (_COARSE if coarse else _TOLERANCE.get(runner.dtype, _COARSE)):
        raise UnsupportedModel(
            f"{type(model).__name__} gives other logits for drafted tokens than for the same ones "
            f"read plainly (off by {worst:.3g} standard deviations): it does not follow the "
            "attention mask or the position_ids, and cannot be decoded speculatively."
        )


_PARENTS = [0, 0, 0, 0, 0, 0, 0, 0, 8, 9]
_PATHS = ([0], [1], [8], [8, 9, 10])  # the root, the first child, the last, and what follows it
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_COARSE = 0.15
"""In 16 bits, where a mixture of experts may even send a token to other experts."""


@torch.inference_mode()
def _plain(model: nn.Module, runner: Runner, ids: list[int]) -> torch.Tensor:
    tokens = torch.tensor([ids], device=runner.device)
    logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits[0, -1].double()
