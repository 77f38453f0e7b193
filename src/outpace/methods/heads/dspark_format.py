"""The published formats of DSpark's heads, and of Domino's, which this library calls the same.

A DFlash configuration with a few entries more, at the top (DeepSpec) or in ``dflash_config``
(SpecForge). Heads of DeepSpec bring copies of the target's embeddings and output matrix.
SpecForge's Domino has entries of its own, and no names around those of its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from outpace.heads.base import Head
from outpace.heads.checkpoint import Format, HeadCheckpoint, architectures
from outpace.heads.folder import HeadFolder
from outpace.methods.heads.dflash import GEMMA4, DFlash
from outpace.methods.heads.dflash_format import (
    ABOUT,
    ANCHOR,
    block_weights,
    dflash_config_dict,
    dflash_head,
    dflash_weights,
    flatten_config,
    guesses_at_root,
)
from outpace.methods.heads.dflash_format import ARCHITECTURE as PLAIN
from outpace.methods.heads.dspark import DSpark
from outpace.methods.heads.gemma4_layer import SUPPORTED_VALUES
from outpace.methods.heads.markov import GRU
from outpace.methods.heads.published import check_supported, rename_prefixes

DOMINO_MODEL = "DominoDraftModel"
OF_GEMMA4 = "Gemma4DSparkModel"
ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel", DOMINO_MODEL, OF_GEMMA4)
ENTRIES = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
PROJECTOR = "projector_type"
DSPARK, DOMINO = "dspark", "domino"
OF_DOMINO = {
    "markov_rank": "emb_dim",
    "gru_hidden_dim": "gru_hidden_dim",
    "pure_draft_prefix_len": "pure_draft_prefix_len",
}
"""Our names of Domino's entries, and theirs."""
NESTED = {"logit_head.": ""}
"""Beginnings of the weights' names in older files."""
BARE = {
    "prefix_gru.": "markov_head.prefix_gru.",
    "embed_proj.": "markov_head.embed_proj.",
}
"""Beginnings of the names of Domino's weights, and ours."""


class DSparkFormat(Format):
    """The target is known by its width, its vocabulary and its number of layers."""

    name: ClassVar[str] = "dspark"

    @classmethod
    def recognises(cls, about: Mapping[str, Any]) -> bool:
        entries = _entries(about)
        names = [name.lower() for name in architectures(about)]
        named = any(each in name for name in names for each in (DSPARK, DOMINO))
        block = ABOUT in about or PLAIN in architectures(about)
        joined = entries.get(PROJECTOR) in (DSPARK, DOMINO) or _is_joined(entries)
        return named or (block and joined)

    @classmethod
    def kind_of(cls, about: Mapping[str, Any]) -> str:
        return "dspark" if _is_joined(_entries(about)) else "dflash"

    @classmethod
    def read(cls, folder: HeadFolder, about: Mapping[str, Any]) -> Head:
        weights = block_weights(folder)
        with folder.describing("dspark"):
            found = architectures(about)
            if found and not found.intersection([*ARCHITECTURES, PLAIN]):
                raise ValueError(
                    f"its architecture is {sorted(found)}, and only {list(ARCHITECTURES)} are known"
                )
            head, weights = dspark_head(about, rename_prefixes(weights, NESTED))
        return folder.fill(head, weights)

    @classmethod
    def write(cls, head: Head) -> HeadCheckpoint:
        if not isinstance(head, DSpark):
            raise cls.refuse(f"holds no {head.kind} heads")
        about = dspark_config_dict(head, cls)
        own = {name: about.pop(name) for name in ENTRIES}
        if head.config.markov_head_type != GRU:
            about["architectures"] = [ARCHITECTURES[1]]
            about[ABOUT] |= {PROJECTOR: DSPARK, **own}
            return HeadCheckpoint(about, dflash_weights(head))
        if head.confidence_head is not None:
            raise cls.refuse("holds no Domino heads with a confidence head")
        about["architectures"] = [DOMINO_MODEL]
        own = {public: getattr(head.config, name) for name, public in OF_DOMINO.items()}
        about[ABOUT] |= {PROJECTOR: DOMINO, ANCHOR[1]: about.pop(ANCHOR[0]), **own}
        bare = {own: public for public, own in BARE.items()}
        return HeadCheckpoint(about, rename_prefixes(dflash_weights(head), bare))


def _entries(about: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a configuration with Domino's under our names."""
    found = flatten_config(about)
    if found.get(PROJECTOR) == DOMINO or DOMINO_MODEL in architectures(about):
        found |= {own: found[public] for own, public in OF_DOMINO.items() if public in found}
        found |= {PROJECTOR: DOMINO, "markov_head_type": GRU}
    return found


def _is_joined(entries: Mapping[str, Any]) -> bool:
    """Whether there is more to a head than to one of DFlash."""
    return any(entries.get(name) for name in ("markov_rank", "enable_confidence_head"))


def dspark_head(
    about: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[DFlash, dict[str, Tensor]]:
    """Returns a head, still without its weights, from its public configuration, and these by our
    names: one of DFlash where nothing joins its tokens. Raises as `dflash_head` does.

    Where nothing says whether the root's place guesses, too, it does, unless a head is called one
    of DFlash and has a Markov head only, or is one of Domino.
    """
    entries = _entries(about)
    kind = entries.get(PROJECTOR)
    if kind not in (None, DSPARK, DOMINO):
        raise ValueError(f"its {PROJECTOR} is {kind!r}, and only {DSPARK!r}, {DOMINO!r} are known")
    if kind != DOMINO and guesses_at_root(entries) is None:
        own = any(entries.get(name) for name in ("enable_confidence_head", PROJECTOR))
        entries[ANCHOR[0]] = own or PLAIN not in architectures(about)
    off = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
    names = (*ENTRIES, *OF_DOMINO) if kind == DOMINO else ENTRIES
    sizes = {name: entries[name] for name in names if entries.get(name) is not None}
    flat = {name: value for name, value in entries.items() if name not in (PROJECTOR, ABOUT)}
    if kind == DOMINO:
        flat.pop("pure_draft_prefix_len", None)
        for name in ("markov_rank", "gru_hidden_dim"):
            sizes[name] = entries[OF_DOMINO[name]]  # a head without one of them is refused
    more: dict[str, Any] = {}
    if OF_GEMMA4 in architectures(about):
        flat, more = _of_gemma4(flat, weights)
    if not _is_joined(entries) and kind != DOMINO:
        return dflash_head(flat, weights, more=more)
    return dflash_head(flat, rename_prefixes(weights, BARE), DSpark, {**off, **sizes, **more})


def _of_gemma4(
    about: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A configuration as of a Qwen3 with the sizes of Gemma 4's full attention, and our further
    sizes. Gemma's own embeddings are scaled, which copies in a file are not."""
    check_supported(about, SUPPORTED_VALUES)
    shared = bool(about.get("attention_k_eq_v"))
    groups = about["num_global_key_value_heads" if shared else "num_key_value_heads"]
    own = {"head_dim": about["global_head_dim"], "num_key_value_heads": groups}
    copies = "embed_tokens.weight" in weights
    scale = float(about["hidden_size"]) ** 0.5 if copies else 1.0
    more = {"family": GEMMA4, "shared_values": shared, "input_embedding_scale": scale}
    return {**about, **own}, more


def dspark_config_dict(head: DSpark, form: type[Format]) -> dict[str, Any]:
    """Returns the public configuration of a head, all entries at the top but for those of DFlash.
    form: as of `dflash_config_dict`."""
    config = head.config
    return {
        **dflash_config_dict(head, form),
        ANCHOR[0]: config.sample_from_anchor,
        **{name: getattr(config, name) for name in ENTRIES},
    }
