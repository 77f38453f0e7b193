"""Other programs as contestants, by name; each is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from outpace.bench.run.contest import Contestant
from outpace.errors import ConfigError, did_you_mean
from outpace.targets.hf.loading.source import names_gguf

QUANTISING = frozenset({"openvino"})
"""Peers that can quantise weights to 8 or 4 bits, if a run asks for it."""

GGUF_READING = frozenset({"llamacpp", "openvino"})
"""Peers that take GGUF files."""


@dataclass(frozen=True)
class Models:
    """The weights, their dtype and device, which must be the same for every contestant."""

    target: str
    drafter: str | None
    dtype: str
    device: str
    quantization: str | None = None
    drafter_quantization: str | None = None
    head: str | None = None
    """A trained head that drafts in the place of a draft model: other programs cannot read it."""


def is_gguf(model: str) -> bool:
    """Returns whether weights come from a GGUF file, whose blocks outpace computes as they are."""
    return model.endswith(".gguf") or names_gguf(model)


HOMES = {
    "hf": "outpace.bench.peers.hf:plain",
    "hf-assisted": "outpace.bench.peers.hf:assisted",
    "openvino": "outpace.bench.peers.openvino:contestants",
    "llamacpp": "outpace.bench.peers.llamacpp:contestants",
}


def check_peers(names: Sequence[str], target: str) -> None:
    """Raises ``ConfigError`` for a name that is no peer's, or one that cannot read such a model:
    what can be told before any model is loaded."""
    for name in names:
        if name not in ("plain", *HOMES):
            raise ConfigError(f"unknown peer {name!r}{did_you_mean(name, ['plain', *HOMES])}.")
        if name != "plain" and is_gguf(target) and name not in GGUF_READING:
            raise ConfigError(
                f"peer {name!r} reads model folders, and this run's model is a GGUF file: leave "
                f"{name!r} out of --vs, or give a folder."
            )


def peers(names: Sequence[str], models: Models) -> list[Contestant]:
    """Returns the contestants of these names; ``ConfigError`` where one cannot run here."""
    check_peers(names, models.target)
    found: list[Contestant] = []
    for name in names:
        if name == "plain":
            continue  # the baseline, which always takes part
        quantised = models.quantization or models.drafter_quantization
        if quantised is not None and name not in QUANTISING:
            raise ConfigError(
                f"peer {name!r} runs the weights as they are, and this run quantises them to "
                f"{quantised}: leave {name!r} out of --vs."
            )
        module, _, function = HOMES[name].partition(":")
        make: Callable[[Models], list[Contestant]] = getattr(import_module(module), function)
        found += make(models)
    return found


def drafter_of(models: Models, peer: str) -> str:
    """Returns the drafter's path, which speculative peers need; ``ConfigError`` for one that the
    peer cannot read."""
    if models.head is not None:
        raise ConfigError(
            f"{peer} drafts with a draft model, and {models.head!r} holds a trained head: leave "
            f"{peer!r} out of --vs, or name a draft model in the first --speculative-config."
        )
    if models.drafter is not None and is_gguf(models.drafter) and peer not in GGUF_READING:
        raise ConfigError(
            f"{peer} reads model folders, and the draft model {models.drafter!r} is a GGUF file: "
            f"leave {peer!r} out of --vs, or give a folder."
        )
    if models.drafter is None:
        raise ConfigError(f"{peer} needs a draft model: give --draft or 'model' in the config.")
    return models.drafter
