"""The mapping of a GGUF file's tensors to a model's weights: their names and their layout.

llama.cpp gives weights names of its own and stores some in another order than transformers does.
Both are undone by transformers' own tables and functions. Those work on numbers, which weights in
blocks are not; so each function is first tried on the numbers of the rows. If it only puts rows in
another order, the same is done to the rows of blocks, which stay as they are inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor, nn

from outpace.core.values import shown
from outpace.targets.cpu.weights.blocks import KINDS, Blocks
from outpace.targets.hf.gguf.families import layout_of
from outpace.targets.hf.gguf.file import GGUFModel
from outpace.targets.hf.gguf.header import StoredTensor
from outpace.targets.hf.gguf.layouts import HALVES, Layout

ELSEWHERE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are no weights: they shape the rotary angles."""


class Order(NamedTuple):
    """What becomes of the rows of a matrix."""

    rows: Tensor | None
    """Their new order ``[N]``; None if it is the old one."""
    turned: bool
    """Whether they become columns, as GPT-2's kind of linear layer holds them."""


@dataclass(frozen=True)
class TensorMapping:
    """Where the tensors of a file go in a model."""

    names: dict[str, str]
    """The weight that each tensor is, or is a part of."""
    processor: Any
    """transformers' function for this family's layout."""

    def lacking(self, model: GGUFModel) -> list[str]:
        """Returns the tensors that a file lacks of weights of which it holds other parts: they are
        put together from zeros."""
        begun = {self.names[name] for name in model.tensors if name in self.names}
        return sorted(
            name for name, ours in self.names.items() if ours in begun and name not in model.tensors
        )

    def weights(
        self, model: GGUFModel, packable: Mapping[str, bool]
    ) -> Iterator[tuple[str, Blocks | Tensor]]:
        """Yields each weight by its name in the model: in blocks where it is in the file and can
        stay so, in the layout ``[N, K]`` of a linear layer, else dequantised to numbers as the
        model holds them.

        packable: the names of weights that may stay in blocks, and whether the model holds them
        turned, ``[K, N]``.
        """
        merged: dict[str, Any] = {"tensors": {}}  # weights that are put together from several
        joined, parts = self._joined(model, packable), Counter(self.names.values())
        for stored in model.tensors.values():
            if stored.name in ELSEWHERE or stored.name not in self.names:
                continue
            name = self.names[stored.name]
            if name in joined:
                if stored.name == joined[name][0].name:
                    yield name, _in_one(joined[name])
                continue
            whole = parts[name] == 1
            blocks = self._blocks(stored, packable.get(name)) if whole else None
            if blocks is not None:
                yield name, blocks
                continue
            found = self._processed(stored.name, numbers_of(stored), merged)
            if found is not None:
                yield name, torch.from_numpy(np.ascontiguousarray(found))
            if stored.kind != "F32":  # whose numbers are used where they lie
                stored.release()
        yield from merged["tensors"].items()

    def _joined(
        self, model: GGUFModel, packable: Mapping[str, bool]
    ) -> dict[str, list[StoredTensor]]:
        """Returns the two halves of each matrix that a file has in two, gates first, where both are
        in blocks of one kind."""
        found: dict[str, list[StoredTensor]] = {}
        for theirs, ours in self.names.items():
            half = HALVES.fullmatch(theirs)
            if half is not None and theirs in model.tensors and packable.get(ours) is False:
                found.setdefault(ours, []).append(model.tensors[theirs])
        pairs = {
            ours: sorted(halves, key=lambda each: ".ffn_up" in each.name)
            for ours, halves in found.items()
            if len(halves) == 2 and len({each.kind for each in halves}) == 1
        }
        return {ours: each for ours, each in pairs.items() if each[0].kind in KINDS}

    def _blocks(self, stored: StoredTensor, turned: bool | None) -> Blocks | None:
        """Returns a matrix in its blocks, for a layer that holds it turned or not; None where that
        cannot be."""
        if turned is None or stored.kind not in KINDS or len(stored.shape) < 2:
            return None
        if len(stored.shape) == 3:  # of experts or heads, for a layer that holds those of all
            return blocks_of(stored)
        order = self._order(stored)
        if order is None or order.turned != turned:
            return None
        if order.rows is None:
            return blocks_of(stored)
        moved = Blocks(stored.kind, stored.rows[order.rows])
        stored.release()
        return moved

    def _order(self, stored: StoredTensor) -> Order | None:
        """Returns what the family's function does to the rows of a matrix, None if it is more than
        to put them in another order."""
        if isinstance(self.processor, Layout) and self.processor.moves_columns(stored.name):
            return None
        rows = stored.shape[0]
        numbers = np.arange(rows, dtype=np.float64)[:, None]  # [N, 1]
        merged: dict[str, Any] = {"tensors": {}}
        found = self._processed(stored.name, numbers, merged)
        if found is None and len(merged["tensors"]) == 1:
            found = next(iter(merged["tensors"].values())).numpy()
        if found is None or found.shape not in ((rows, 1), (1, rows)):
            return None
        order, plain = torch.from_numpy(found.reshape(-1).copy()), torch.arange(rows).double()
        if not torch.equal(order.sort().values, plain):
            return None
        turned = found.shape != numbers.shape
        return Order(None if torch.equal(order, plain) else order.long(), turned)

    def _processed(self, name: str, numbers: Any, merged: dict[str, Any]) -> Any:
        """Returns numbers in the layout of the model, None if they went into ``merged``."""
        result = self.processor.process(
            weights=numbers,
            name=name,
            # Experts are looked up without their suffix.
            tensor_key_mapping={name.removesuffix(".weight"): self.names[name]},
            parsed_parameters=merged,
        )
        return result.weights if result.name is not None else None


def blocks_of(stored: StoredTensor) -> Blocks:
    """Returns a matrix as the file holds it, whose pages can be released."""
    return Blocks(stored.kind, stored.rows, stored.release)


def _in_one(halves: Sequence[StoredTensor]) -> Blocks:
    """Returns one matrix with the rows of several."""
    whole = Blocks(halves[0].kind, torch.cat([half.rows for half in halves]))
    for half in halves:
        half.release()
    return whole


def numbers_of(stored: StoredTensor) -> Any:
    """Returns a tensor as a float32 array of its shape."""
    kind = gguf.GGMLQuantizationType[stored.kind]
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    shape = (*stored.shape[:-1], stored.shape[-1] // size * nbytes)
    if stored.kind == "F32":
        return stored.raw.numpy().view("<f4").reshape(stored.shape)
    if stored.kind == "F16":
        return stored.raw.numpy().view("<f2").reshape(stored.shape).astype(np.float32)
    dequantize: Any = gguf.quants.dequantize
    return dequantize(stored.raw.numpy().reshape(shape), kind)


def map_tensors(model: GGUFModel, built: nn.Module) -> TensorMapping:
    """Returns where the tensors of a file go in a model that was built for it.

    Raises ``UnsupportedModel`` for tensors that the model has no place for.
    """
    config: Any = built.config
    processor = layout_of(model.architecture, config)
    names = _names(model, built, processor)
    more = sorted(set(model.tensors) - names.keys() - set(ELSEWHERE))
    if isinstance(processor, Layout):
        more = [name for name in more if not processor.is_spare(name)]
    if more:
        raise model.unread(
            f"holds weights that transformers' {type(built).__name__} has no place for "
            f"({shown(more[0])} is one)"
        )
    return TensorMapping(names, processor)


def _names(model: GGUFModel, built: nn.Module, processor: Any) -> dict[str, str]:
    config: Any = built.config
    known = gguf.MODEL_ARCH_NAMES.items()
    kind = next(kind for kind, name in known if name == model.architecture)
    table = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    names: dict[str, str] = {}
    for ours in built.state_dict():
        plain = processor.preprocess_name(ours)
        stem, dot, suffix = plain.rpartition(".")
        stem, suffix = (stem, dot + suffix) if suffix in ("weight", "bias") else (plain, "")
        theirs = table.get_name(stem)
        places = processor.places(plain) if isinstance(processor, Layout) else []
        if places and f"{theirs}{suffix or '.weight'}" not in model.tensors:
            names |= dict.fromkeys(places, plain)
        elif theirs is not None:
            # Experts are parameters of their own in transformers, and have no suffix there.
            names[theirs + (suffix or ".weight")] = plain
        else:
            processor.perform_fallback_tensor_mapping(names, suffix or ".weight", "", plain)
    return names
