"""EAGLE-3: a decoder layer or more over the text, which reads some layers of the target.

Li et al. 2025, arXiv 2503.01840; its edition 3.1 (norms of the states that are read, and of what is
read again) and P-EAGLE, which guesses all depths at once. The parts are named as in the published
checkpoints, but for the layers after the first, which are called ``stack`` here.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outpace.draft.base import Rows, Setup
from outpace.errors import UnsupportedModel
from outpace.heads.base import Head, HeadConfig, Shared, TargetShape, begin_as_last, config_of
from outpace.heads.checkpoint import Content, Format, architectures
from outpace.heads.folder import CONFIG, Folder
from outpace.heads.layers import (
    Attention,
    DecoderLayer,
    Entries,
    FeedForward,
    LayerConfig,
    Norm,
    Sight,
)
from outpace.methods.heads.attending import AttendingHead, AttendingHeadDrafter
from outpace.methods.heads.base import ByDepth, named
from outpace.methods.heads.published import (
    about_layers,
    check_only,
    layer_sizes,
    own_d2t,
    public_d2t,
    renamed,
    windows,
    without_derived,
)
from outpace.targets.hf.loading.loaded import Loaded
from outpace.train.teacher import Teacher

# -- the network -----------------------------------------------------------------------------------


DEEP = 8
"""Layers from which on a target's three states are taken where the paper takes them."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LayerConfig):
    """What an EAGLE-3 head is built from. Sizes that are 0 follow from the target's width."""

    depths: int = 5
    """Tokens after the root that it is trained for; it drafts as far as it is asked to, or as far
    as this if it guesses all depths at once."""
    reads: list[int] = field(default_factory=list)
    """The target's layers that it reads; none: three, as `Eagle3.layers` says."""
    layers: int = 1
    """Its own decoder layers."""
    hidden_size: int = 0
    """Its own width; 0: the target's."""
    own_embedding: bool = False
    """Whether it has embeddings of its own instead of the target's."""
    own_head: bool = True
    """Whether it has an output matrix of its own instead of the target's."""
    normed: bool = False
    """Whether queries and keys are normalised, as in Qwen3."""
    bias: bool = False
    """Whether queries, keys and values have a bias."""
    output_bias: bool = False
    """Whether what the attention heads say together has one."""
    windows: list[int] = field(default_factory=list)
    """How many entries each layer attends to, 0 for all; none: all layers to all."""
    norm_before_residual: bool = False
    """Whether what the layer does is added to the normalised guide, and not to the guide."""
    norm_before_fc: bool = False
    """Whether the states that it reads are normalised together."""
    fc_norm: bool = False
    """Whether each of them is normalised by itself."""
    norm_output: bool = False
    """Whether it goes on from its normalised output."""
    fused: bool = True
    """Whether ``fc`` makes the guide; otherwise the one state that it reads is the guide."""
    fusion_bias: bool = False
    """Whether ``fc`` has a bias."""
    parallel: bool = False
    """Whether masks stand after the text, so that all depths are guessed at once (P-EAGLE)."""
    mask_token: int = 0
    """The target's token that a mask is, with a learned state before it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(type(at) is not int or at < -1 for at in self.reads):
            raise ValueError(f"reads is {self.reads!r}, and not layers of the target")
        if self.layers < 1:
            raise ValueError("it has no layers")
        if self.windows and len(self.windows) != self.layers:
            raise ValueError(f"windows is {self.windows!r}, and it has {self.layers} layers")
        if not self.fused and (len(self.reads) > 1 or self.norm_before_fc or self.fc_norm):
            raise ValueError("fused is false, and one state as it is can be its guide only")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm do not go together")


class Eagle3(AttendingHead):
    """Decoder layers on the target's embedding of a token and a guide, side by side."""

    kind: ClassVar[str] = "eagle3"
    Config: ClassVar[type[HeadConfig]] = Eagle3Config
    config: Eagle3Config
    before_last_norm: ClassVar[bool] = True

    def __init__(self, target: TargetShape, config: Eagle3Config) -> None:
        super().__init__(target, config)
        size, eps = config.hidden_size or target.hidden_size, config.norm_eps
        if config.mask_token >= target.vocab_size:
            raise ValueError(f"mask_token is {config.mask_token} of {target.vocab_size} tokens")
        if size != target.hidden_size and not (config.own_embedding and config.own_head):
            raise ValueError(
                f"it is {size} wide and its target {target.hidden_size}, and it has no embeddings "
                "or no output matrix of its own"
            )
        if not config.own_head and config.draft_vocab_size:
            raise ValueError("it knows some tokens only, and has no output matrix of its own")
        self.names_no_layers = not config.reads and not target.layers
        """Whether it comes from a file that says neither what it reads nor how many layers its
        target has: which ones it reads is a guess."""
        count = len(config.reads) or (3 if config.fused else 1)
        wide = count * target.hidden_size
        self.input_norm = Norm(wide, eps=eps) if config.norm_before_fc else None
        norms = [Norm(target.hidden_size, eps=eps) for _ in range(count if config.fc_norm else 0)]
        self.fc_norm = nn.ModuleList(norms) if norms else None
        self.fc = nn.Linear(wide, size, bias=config.fusion_bias) if config.fused else None
        self.midlayer = MidLayer(size, config)
        self.stack = nn.ModuleDict(  # numbered as in the files
            {str(number): _layer(size, config, number) for number in range(1, config.layers)}
        )
        self.norm = Norm(size, eps=eps)
        self.lm_head = nn.Linear(size, self.vocabulary, bias=False) if config.own_head else None
        self.embed_tokens = nn.Embedding(target.vocab_size, size) if config.own_embedding else None
        self.mask_hidden = nn.Parameter(torch.randn(wide)) if config.parallel else None

    @property
    def layers(self) -> tuple[int, ...]:
        """After two layers, in the middle, and three before the end. Where that does not make
        three places, a third and two thirds of the way up, and what the target's head reads."""
        count = self.target.layers
        if self.config.reads:
            return tuple(self.config.reads)
        if not self.config.fused:
            return (-1,)
        if count >= DEEP:
            return (2, count // 2, count - 3)
        return (count // 3, 2 * count // 3, -1)

    @property
    def depths_at_once(self) -> int:
        return self.config.depths if self.config.parallel else 1

    @property
    def shares_output(self) -> bool:
        return self.lm_head is None

    def guide(self, states: Tensor) -> Tensor:
        states = states.to(self.dtype)
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = zip(self.fc_norm, states.chunk(len(self.fc_norm), -1), strict=True)
            states = torch.cat([norm(part) for norm, part in parts], -1)
        found: Tensor = states if self.fc is None else self.fc(states)
        return found

    def begin(self, rows: int) -> Entries:
        each = self.midlayer.self_attn.begin(rows)
        return Entries.of_layers([each] * self.config.layers)

    def step(
        self, guides: Tensor, tokens: Tensor, sight: Sight, shared: Shared
    ) -> tuple[Tensor, Entries]:
        embed = shared.embed if self.embed_tokens is None else self.embed_tokens
        before = sight.before.by_layer(self.config.layers)
        embedded = embed(tokens).to(guides.dtype)
        x, own = self.midlayer(embedded, guides, replace(sight, before=before[0]))
        entries = [own]
        for layer, earlier in zip(self.stack.values(), before[1:], strict=True):
            x, own = layer(x, replace(sight, before=earlier))
            entries.append(own)
        return self.norm(x) if self.config.norm_output else x, Entries.of_layers(entries)

    def logits(self, outputs: Tensor, shared: Shared) -> Tensor:
        x = outputs if self.config.norm_output else self.norm(outputs)
        found: Tensor = shared.head(x) if self.lm_head is None else self.lm_head(x)
        return found

    def after_text(self, outputs: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        if self.mask_hidden is None:
            return outputs, tokens
        mask = self.guide(self.mask_hidden).expand_as(outputs)
        return mask, torch.full_like(tokens, self.config.mask_token)

    @torch.no_grad()
    def begin_from(self, shared_head: Tensor | None) -> None:
        """The guide begins as the highest of the states, the head as the target's, in a head of the
        target's width."""
        if self.norm.weight.numel() != self.target.hidden_size:
            return
        if self.fc is not None:
            begin_as_last(self.fc)
        if shared_head is not None and self.lm_head is not None:
            self.lm_head.weight.copy_(shared_head)


class MidLayer(nn.Module):
    """A Llama layer whose attention reads embedding and guide, each normalised, side by side."""

    def __init__(self, size: int, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = Norm(size, eps=config.norm_eps)
        self.hidden_norm = Norm(size, eps=config.norm_eps)
        self.self_attn = Attention(size, config, inputs=2 * size, **_attention(config, 0))
        self._norm_first = config.norm_before_residual
        self.post_attention_layernorm = Norm(size, eps=config.norm_eps)
        self.mlp = FeedForward(size, config.inner_size or 3 * size)

    def forward(self, embedded: Tensor, guides: Tensor, sight: Sight) -> tuple[Tensor, Entries]:
        """As `AttendingHead.step`."""
        normed = self.hidden_norm(guides)
        seen = torch.cat([self.input_layernorm(embedded), normed], -1)
        attended, entries = self.self_attn(seen, sight)
        state = (normed if self._norm_first else guides) + attended
        return state + self.mlp(self.post_attention_layernorm(state)), entries


def _layer(size: int, config: Eagle3Config, number: int) -> DecoderLayer:
    """A layer after the first one, which is numbered 0."""
    return DecoderLayer(size, config, **_attention(config, number))


def _attention(config: Eagle3Config, number: int) -> dict[str, Any]:
    window = config.windows[number] if config.windows else 0
    kinds = {"bias": config.bias, "output_bias": config.output_bias, "normed": config.normed}
    return {**kinds, "window": window}


# -- how it drafts ---------------------------------------------------------------------------------


class Eagle3Drafter(AttendingHeadDrafter):
    """Drafts with an `Eagle3` head."""

    name: ClassVar[str] = "eagle3"
    head: Eagle3

    @property
    def deepest(self) -> int | None:
        return self.head.config.depths if self.head.config.parallel else None

    @classmethod
    def head_for(cls, setup: Setup) -> Head:
        head = super().head_for(setup)
        if isinstance(head, Eagle3) and head.names_no_layers and head.config.fused:
            find_layers(head, setup.loaded, named(setup.options.model))
        return head

    def walk(self, rows: Rows) -> Any:
        walk = super().walk(rows)
        return walk if self.deepest is None else ByDepth(walk.ahead(self.deepest))


TEXT = """Once upon a time, there was a little girl who lived with her mother in a small house near
the forest. One day her mother said to her: "Please take this bread to your grandmother, and do not
stop on the way." So the girl put on her coat and went into the forest.

def mean(values):
    if not values:
        return 0.0
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

Question: What is the capital of France, and what is it known for?
Answer: The capital of France is Paris. It is known for the Eiffel Tower, the Louvre and its food.
"""
"""What a head that names no layers is tried on."""

CLEARLY = 0.1
"""By which share of its tokens other layers have to be better than those that are usual."""


def find_layers(head: Eagle3, loaded: Loaded, what: str) -> None:
    """Has a head whose file names no layers read the usual ones, or their neighbours, if it guesses
    clearly better from these, and warns that it is a guess. what: what errors call the head."""
    usual, count = head.layers, loaded.config.num_hidden_layers
    shifted = [tuple(at + step for at in usual) for step in (1, -1)] if -1 not in usual else []
    ways = [usual, *(way for way in shifted if way[0] >= 0 and way[-1] < count)]
    hits, places = _hits(head, loaded, ways)
    best = max(range(len(ways)), key=lambda way: (hits[way], -way))
    chosen = best if hits[best] - hits[0] > CLEARLY * places else 0
    head.config = replace(head.config, reads=[*ways[chosen]])
    told = f"; with them it guesses {hits[chosen]} of {places} tokens right" if places else ""
    warnings.warn(
        f"{what} does not say which layers of its target it reads: {list(ways[chosen])} are a "
        f"guess{told}. Add {LAYERS} to its {CONFIG}.",
        stacklevel=2,
    )


def _hits(head: Eagle3, loaded: Loaded, ways: Sequence[tuple[int, ...]]) -> tuple[list[int], int]:
    """How many tokens of a text a head guesses as the target does, from each of some choices of
    layers, and how many there are; none where that cannot be tried."""
    nothing = [0] * len(ways)
    longest = loaded.max_length or len(TEXT)
    ids = [] if loaded.tokenizer is None else loaded.tokenizer(TEXT)["input_ids"][:longest]
    if len(ids) < 3:
        return nothing, 0
    layers = sorted({layer for way in ways for layer in way})
    try:
        teacher = Teacher(loaded, layers, top=1)
    except UnsupportedModel:
        return nothing, 0
    head = head.to(teacher.device)
    batch = teacher.read(torch.tensor([ids]))
    parts = dict(zip(layers, batch.states.chunk(len(layers), -1), strict=True))
    found = []
    with torch.no_grad():
        for way in ways:
            guides = head.guide(torch.cat([parts[layer] for layer in way], -1)[:, :-1])
            sight = Sight.of_texts(head.begin(1), len(ids) - 1)
            outputs, _ = head.step(guides, batch.tokens[:, 1:], sight, teacher)
            guesses = head.d2t[head.logits(outputs, teacher).argmax(-1)]
            found.append(int((guesses == batch.top_tokens[:, 1:, 0]).sum()))
    return found, len(ids) - 1


# -- its published format --------------------------------------------------------------------------

# EAGLE-3's published heads: ``config.json`` as of a Llama model with one layer, or a few.
#
# The weights are ``fc``, the first layer, maybe further ones, ``norm`` and ``lm_head``, under
# several names (`NAMES`). A head that knows some of the target's tokens only brings ``d2t``, which
# is what to add to the number of each of its own tokens to get the target's, and ``t2d``, which
# says of each of the target's tokens whether it is one of them. What the weights show is not asked
# of the configuration, which is often a copy of the target's with some entries changed.


ARCHITECTURES = (
    "LlamaForCausalLMEagle3",  # SafeAILab, SGLang, SpecForge, TensorRT-LLM, ModelOpt
    "Eagle3LlamaForCausalLM",  # vLLM, llama.cpp
    "LlamaEagle3DraftModel",  # NeMo Automodel
    "PEagleDraftModel",  # SpecForge
    "PeagleLlamaForCausalLM",  # vLLM
)
LAYERS = "eagle_aux_hidden_state_layer_ids"
NESTED = "eagle_config"
"""An entry with further ones, which come before those that stand next to it."""
STATES = "outpace_counts_states"
"""Whether `LAYERS` are numbers of hidden states even if the first one is 1: an entry of ours."""
MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
"""What the token of a mask is called."""
DEPTHS = 8
"""What P-EAGLE's code trains for where nothing is said."""

NAMES: Sequence[Mapping[str, str]] = (
    {"model.": ""},
    {"layers.0.": "midlayer.", "layers.": "stack."},
)
"""Other beginnings of weights' names, and ours. They are replaced one table after the other."""
PUBLIC: Mapping[str, str] = {"stack.": "layers."}

ONLY: Mapping[str, Any] = {
    "logit_scale": 1.0,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
"""Entries by which a head that is built otherwise, and cannot be read, is told."""


class Eagle3Format(Format):
    """The target is known by its width and its vocabulary only."""

    name: ClassVar[str] = "eagle3"

    @classmethod
    def recognises(cls, about: Mapping[str, Any]) -> bool:
        names = [name.lower() for name in architectures(about)]
        return any("eagle3" in name or "peagle" in name for name in names)

    @classmethod
    def read(cls, folder: Folder, about: Mapping[str, Any]) -> Head:
        if not architectures(about).intersection(ARCHITECTURES):
            raise folder.unfit(
                "eagle3",
                f"its architecture is {sorted(architectures(about))}, and only "
                f"{list(ARCHITECTURES)} are known",
            )
        weights = eagle3_names(folder.read_weights("model.safetensors", "pytorch_model.bin"))
        with folder.describing("eagle3"):
            head = eagle3_head(about, weights)
        return folder.fill(head, weights)

    @classmethod
    def write(cls, head: Head) -> Content:
        if not isinstance(head, Eagle3):
            raise cls.refuse(f"holds no {head.kind} heads")
        about = {"architectures": [ARCHITECTURES[0]], "model_type": "llama", **about_eagle3(head)}
        return Content(about, renamed(eagle3_weights(head), PUBLIC))


def eagle3_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of a published head by our names."""
    found = without_derived(weights)
    for names in NAMES:
        found = renamed(found, names)
    return found


def eagle3_head(about: Mapping[str, Any], weights: dict[str, Tensor]) -> Eagle3:
    """Returns a head, still without its weights, from its public configuration, and gives the
    weights, which have our names, our ``d2t``. Raises one of `heads.folder.UNFIT` where they do not
    fit."""
    about = {**about, **(about.get(NESTED) or {})}
    size = about.get("target_hidden_size") or about["hidden_size"]
    if about.get("tie_word_embeddings") and "lm_head.weight" not in weights:
        weights["lm_head.weight"] = weights["embed_tokens.weight"].clone()
    if "mask_hidden" in weights:
        weights["mask_hidden"] = weights["mask_hidden"].flatten()
    target = TargetShape(size, about["vocab_size"], 0)
    head = Eagle3(target, _config(about, weights, size))
    weights["d2t"] = own_d2t(weights, head)
    return head


def eagle3_weights(head: Eagle3) -> dict[str, Tensor]:
    """Returns the weights of a head by their public names, but for those of its layers."""
    weights = public_d2t(head)
    if head.mask_hidden is not None:
        weights["mask_hidden"] = weights["mask_hidden"][None, None]
    return weights


def _config(about: Mapping[str, Any], weights: Mapping[str, Tensor], size: int) -> Eagle3Config:
    check_only(about, ONLY)
    fused, parallel = about.get("use_aux_hidden_state", True), "mask_hidden" in weights
    layers = _own_layers(about, weights)
    given = {
        **layer_sizes(about),
        "depths": about.get("num_depths") or (DEPTHS if parallel else Eagle3Config().depths),
        "draft_vocab_size": about.get("draft_vocab_size") or 0 if "d2t" in weights else 0,
        "reads": _reads(about, weights, size) if fused else [],
        "layers": layers,
        "hidden_size": about["hidden_size"] if about["hidden_size"] != size else 0,
        "own_embedding": "embed_tokens.weight" in weights,
        "own_head": "lm_head.weight" in weights,
        "normed": "midlayer.self_attn.q_norm.weight" in weights,
        "bias": "midlayer.self_attn.q_proj.bias" in weights,
        "output_bias": "midlayer.self_attn.o_proj.bias" in weights,
        "windows": windows(about, layers),
        "fused": fused,
        "fusion_bias": "fc.bias" in weights,
        "parallel": parallel,
        "mask_token": _mask(about) if parallel else 0,
        **{name: about.get(name) or False for name in NORMS},
    }
    return config_of(Eagle3Config, given)


NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Entries about norms, which are called as ours and false where nothing is said."""


def _own_layers(about: Mapping[str, Any], weights: Mapping[str, Tensor]) -> int:
    """How many layers there are weights of. A configuration may have the target's number."""
    count = 1 + len({name.split(".")[1] for name in weights if name.startswith("stack.")})
    if count > 1 and about.get("num_hidden_layers") != count:
        raise ValueError(
            f"its num_hidden_layers is {about.get('num_hidden_layers')!r}, and it has weights of "
            f"{count} layers"
        )
    return count


def _reads(about: Mapping[str, Any], weights: Mapping[str, Tensor], size: int) -> list[int]:
    """The numbers of the hidden states that ``fc`` joins; none: the usual three.

    Files name them in two ways. A list that begins with 1 numbers the target's layers from 0, whose
    outputs are the states one further up; any other numbers the states, of which the first is the
    embedding: nobody reads the state after the first layer first (SGLang, pull request 25454)."""
    given = about.get(LAYERS) or []
    fc = weights.get("fc.weight")
    joined = len(given) or 3 if fc is None or fc.dim() != 2 else fc.shape[1] / size
    if joined != len(given) and (given or joined != 3):
        named = f"{LAYERS} is {given}" if given else f"it has no {LAYERS}"
        raise ValueError(f"fc joins {joined:g} of its target's states, and {named}")
    outputs = given[:1] == [1] and not about.get(STATES)
    return [at + 1 for at in given] if outputs else list(given)


def _mask(about: Mapping[str, Any]) -> int:
    found = [about[name] for name in MASKS if about.get(name) is not None]
    if not found or type(found[0]) is not int:
        raise ValueError(f"it has a mask_hidden, and none of {list(MASKS)} is a token")
    return found[0]


def about_eagle3(head: Eagle3) -> dict[str, Any]:
    """Returns the public configuration of a head."""
    config, layer = head.config, head.midlayer
    about = {
        "attention_bias": config.bias,
        "mlp_bias": False,
        "norm_before_residual": config.norm_before_residual,
        "draft_vocab_size": head.vocabulary,
        **about_layers(head, layer.self_attn, layer.mlp.up_proj.out_features, config.layers),
        **{name: True for name in NORMS if getattr(config, name)},
    }
    if config.hidden_size:
        about["target_hidden_size"] = head.target.hidden_size
    if config.parallel:
        about |= {"num_depths": config.depths} | dict.fromkeys(MASKS[:2], config.mask_token)
    if not config.fused:
        about[NESTED] = {"use_aux_hidden_state": False}
    elif head.target.layers or config.reads:
        about[LAYERS] = list(head.layers)
        if head.layers[0] == 1:
            about[STATES] = True
    return about
