"""Other programs as contestants, by name; each is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from outpace.bench.contest import Contestant
from outpace.errors import ConfigError, did_you_mean
from outpace.targets.hf.loading.source import names_gguf


@dataclass(frozen=True)
class Models:
    """The weights, their dtype and device, which must be the same for every contestant."""

    target: str
    drafter: str | None
    dtype: str
    device: str
    quantization: str | None = None
    drafter_quantization: str | None = None
    adapted: bool = False
    """Whether an adapter was merged into target or drafter."""
    head: str | None = None
    """A trained head that drafts in the place of a draft model: other programs cannot read it."""


def is_gguf(model: str) -> bool:
    """Returns whether weights come from a GGUF file, whose blocks outpace computes as they are."""
    return model.endswith(".gguf") or names_gguf(model)


@dataclass(frozen=True)
class Peer:
    """Another program, and its ways of generating, each of which ``--vs`` can name."""

    home: str
    """Module and function that make contestants from `Models` and variants."""
    variants: tuple[str, ...]
    quantises: bool = False
    """Whether it can round weights to 8 or 4 bits, if a run asks for it."""


WITH_DRAFTS = ("plain", "speculative-3", "speculative-5")
PEERS = {
    "hf": Peer("outpace.bench.peers.hf:plain", ("plain",)),
    "hf-assisted": Peer("outpace.bench.peers.hf:assisted", ("3", "5", "heuristic", "default")),
    "openvino": Peer("outpace.bench.peers.openvino:contestants", WITH_DRAFTS, quantises=True),
    "llamacpp": Peer("outpace.bench.peers.llamacpp:llamacpp", WITH_DRAFTS),
    "ik_llamacpp": Peer("outpace.bench.peers.llamacpp:ik_llamacpp", WITH_DRAFTS),
}


def named(name: str) -> tuple[str, tuple[str, ...]]:
    """Returns a peer, and which of its ways of generating are meant: "llamacpp" means all of them,
    "llamacpp-plain" one. Raises ``ConfigError`` for a name that is nobody's.

    >>> named("hf-assisted-3")
    ('hf-assisted', ('3',))
    """
    if name in PEERS:
        return name, PEERS[name].variants
    for peer, about in PEERS.items():
        variant = name.removeprefix(f"{peer}-")
        if variant in about.variants and variant != name:
            return peer, (variant,)
    raise ConfigError(f"unknown peer {name!r}{did_you_mean(name, ['plain', *PEERS])}.")


def check_peers(names: Sequence[str]) -> None:
    """Raises ``ConfigError`` for a name that is no peer's, before any model is loaded."""
    for name in names:
        if name != "plain":  # the baseline, which always takes part
            named(name)


def peers(names: Sequence[str], models: Models) -> list[Contestant]:
    """Returns the contestants of these names; ``ConfigError`` where one cannot run here. Without a
    draft model that a peer can read, a peer that is named as a whole decodes plainly only."""
    asked: dict[str, dict[str, None]] = {}  # the ways of each peer, each once
    for name in names:
        if name == "plain":
            continue
        if models.adapted:
            raise ConfigError(
                f"peer {name!r} reads models as their files hold them, without the adapter that "
                f"lora names: leave {name!r} out of --vs, or name a merged model."
            )
        peer, variants = named(name)
        about = PEERS[peer]
        quantised = models.quantization or models.drafter_quantization
        if quantised is not None and not about.quantises:
            raise ConfigError(
                f"peer {name!r} runs the weights as they are, and this run quantises them to "
                f"{quantised}: leave {name!r} out of --vs."
            )
        if models.drafter is None and "plain" in variants:
            variants = ("plain",)
        asked.setdefault(peer, {}).update(dict.fromkeys(variants))
    found: list[Contestant] = []
    for peer, ways in asked.items():
        module, _, function = PEERS[peer].home.partition(":")
        make: Callable[[Models, Sequence[str]], list[Contestant]]
        make = getattr(import_module(module), function)
        found += make(models, tuple(ways))
    return found


def drafter_of(models: Models, peer: str) -> str:
    """Returns the drafter's path, which speculative peers need; ``ConfigError`` where there is
    none, or a trained head."""
    if models.head is not None:
        raise ConfigError(
            f"{peer} drafts with a draft model, and {models.head!r} holds a trained head: leave "
            f"{peer!r} out of --vs, or name a draft model in the first --speculative-config."
        )
    if models.drafter is None:
        raise ConfigError(f"{peer} needs a draft model: give --draft or 'model' in the config.")
    return models.drafter
