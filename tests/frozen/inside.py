"""Everything that the fixture needs of outpace's inside: whoever moves a module mends it here.

All the rest of this folder calls what users call: ``LLM``, ``SamplingParams``, the command line.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import outpace


def command_line() -> Any:
    """Returns the Typer app of the executable ``outpace``."""
    from outpace.cli.main import app

    return app


def server(llm: Any, name: str) -> Any:
    """Returns the ASGI app of a server over an LLM, which it calls by this name."""
    from outpace.serve.app import Server
    from outpace.serve.settings import Settings

    return Server(llm, Settings(model_name=name)).app


def bundled(part: str) -> str:
    """Returns the folder of a bundled model: "target", "drafter", "heads/eagle3"."""
    return str(Path(outpace.__file__).parent / "bundled" / part)


def errors() -> dict[str, type[Exception]]:
    """Returns the errors that users may catch, by name."""
    from outpace import errors

    found = {name: each for name, each in vars(errors).items() if isinstance(each, type)}
    return {name: each for name, each in found.items() if issubclass(each, errors.OutpaceError)}


# -- registries --------------------------------------------------------------------------------


def groups() -> dict[str, list[str]]:
    """Returns the entry-point groups through which packages add something, with our own names."""
    from outpace.draft.registry import REGISTRY as METHODS
    from outpace.heads.registry import FORMATS
    from outpace.heads.registry import REGISTRY as HEADS
    from outpace.policy.lengths.registry import REGISTRY as LENGTHS
    from outpace.verify.registry import REGISTRY as RULES

    registries: tuple[Any, ...] = (METHODS, RULES, LENGTHS, HEADS, FORMATS)
    return {each._group: sorted(each._own) for each in registries}


def methods() -> dict[str, dict[str, Any]]:
    """Returns the drafting methods: the rule that each has by default, and its options."""
    from outpace.draft.registry import drafters

    return {
        name: {"rule": kind.default_rule, "options": _options(kind.Options)}
        for name, kind in drafters().items()
    }


def rules() -> dict[str, dict[str, Any]]:
    """Returns the rules: whether each is lossless, and its options."""
    from outpace.verify.registry import rules

    return {
        name: {"lossless": kind.lossless, "options": _options(kind)}
        for name, kind in rules().items()
    }


def lengths() -> dict[str, dict[str, Any]]:
    """Returns the length policies with their options."""
    from outpace.policy.lengths.registry import find_length, length_names

    return {name: {"options": _options(find_length(name).Options)} for name in length_names()}


def _options(kind: type[Any]) -> dict[str, Any]:
    """Returns name, type, default and help of each option of a dataclass."""
    from outpace.core.options import described

    types = {one.name: str(one.type) for one in dataclasses.fields(kind)} if _has(kind) else {}
    return {
        one.name: {
            "type": types[one.name],
            "default": "(needed)" if one.needed else repr(one.default),
            "help": one.help,
        }
        for one in described(kind)
    }


def _has(kind: type[Any]) -> bool:
    return dataclasses.is_dataclass(kind)


# -- trained heads -----------------------------------------------------------------------------

SIZES: Mapping[str, Mapping[str, Any]] = {
    "mlp_speculator": {"inner_size": 24},
    "diffusion": {"width": 24, "blocks": 1},
    "dflash": {"layers": 2},
    "dspark": {"layers": 2, "markov_rank": 16},
}
"""Sizes of dummy heads that are larger than a file in a repository needs to be."""


def dummy_options(method: str, model: Any) -> Mapping[str, Any]:
    """Returns the options with which the contract tests build a method for this model."""
    from outpace.draft.registry import find_drafter
    from outpace.targets.hf.loading.loaded import LoadedModel

    with torch.inference_mode(False):
        return find_drafter(method).dummy_options(LoadedModel(model, None, "frozen"))


def dummy_heads(model: Any) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Tensor]]]:
    """Yields method, configuration and weights, as in a folder, of a small head of each kind for
    this model: the dummy options that the contract tests use, too."""
    from outpace.draft.registry import find_drafter
    from outpace.heads.checkpoint import save_head
    from outpace.heads.registry import head_names
    from outpace.targets.hf.loading.loaded import LoadedModel

    for method in head_names():
        kind: Any = find_drafter(method)
        sizes = {**kind.dummy_sizes, **SIZES.get(method, {})}
        small: Any = type(kind.__name__, (kind,), {"dummy_sizes": sizes})
        with torch.inference_mode(False):
            head = small.dummy_options(LoadedModel(model, None, "frozen"))["model"]
        with tempfile.TemporaryDirectory() as folder:
            save_head(head, folder)
            about = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
            yield method, about, load_file(Path(folder) / "model.safetensors")
