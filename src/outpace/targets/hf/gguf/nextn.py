"""The multi-token-prediction modules in a GGUF file: layers after a model's last one, or all that
there is in a file of their own, as llama.cpp's converter writes with ``--mtp``.

Their tensors are those of a layer, and ``blk.N.nextn.*`` around it (llama.cpp's ``constants.py``).
What a file leaves out is the model's: embeddings, last norm, output matrix.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from outpace.errors import ModelLoadError, OutpaceError, UnsupportedModel, reason_of
from outpace.targets.cpu.weights.blocks import KINDS, BlockEmbedding, BlockLinear
from outpace.targets.hf.attention import attention_for
from outpace.targets.hf.gguf.architecture import config_of
from outpace.targets.hf.gguf.building import empty_model, filled
from outpace.targets.hf.gguf.families import layout_of
from outpace.targets.hf.gguf.file import GGUFModel
from outpace.targets.hf.gguf.header import StoredTensor
from outpace.targets.hf.gguf.names import blocks_of, numbers_of
from outpace.targets.hf.nextn import NextN, NextNLayers, last_norm

AROUND = "blk.0.nextn."
TABLE, OUTPUT, NORM = "token_embd.weight", "output.weight", "output_norm.weight"
ATTENDS = np.array([False])
"""What says that the layer of a module is not recurrent."""
FEW = 2
"""Rows of the embedding that a module is built with: it is given the target's."""


@dataclass(frozen=True, eq=False)
class _Into:
    """How weights become parts of a module."""

    dtype: torch.dtype
    packed: bool
    """Whether weights stay in blocks where they can."""


def read_gguf_modules(
    model: GGUFModel,
    dtype: torch.dtype,
    device: torch.device,
    packed: bool,
) -> list[NextN]:
    """Returns the modules of a file.

    dtype: of weights that are in no blocks. packed: whether weights stay in blocks where they can.
    Raises ``UnsupportedModel`` for modules that are not read, ``ModelLoadError`` for those that
    lack weights.
    """
    try:
        return [
            _moved(_Module(model, tensors, _Into(dtype, packed)).made(), device)
            for tensors in model.nextn
        ]
    except OutpaceError:
        raise
    except Exception as error:  # models raise all sorts over configurations that make no sense
        raise UnsupportedModel(
            f"the multi-token-prediction module in {model.path} cannot be read "
            f"({reason_of(error)[:200]}): use another drafter."
        ) from error


def _moved(found: NextN, device: torch.device) -> NextN:
    for part in (found.enorm, found.hnorm, found.eh_proj, found.layers, found.embed, found.head):
        if part is not None:
            part.to(device)
    return found


class _Module:
    """One module of a file."""

    def __init__(self, model: GGUFModel, tensors: dict[str, StoredTensor], into: _Into) -> None:
        self._model, self._into = model, into
        self._around = {
            name.removeprefix(AROUND): tensor
            for name, tensor in tensors.items()
            if name.startswith(AROUND)
        }
        inside = {name: each for name, each in tensors.items() if not name.startswith(AROUND)}
        own_norm = self._around.get("shared_head_norm.weight")
        norm = model.tensors.get(NORM) if own_norm is None else replace(own_norm, name=NORM)
        missing = [name for name in ("eh_proj", "enorm", "hnorm") if self._lacks(name)]
        if norm is None or missing:
            raise ModelLoadError(
                f"the multi-token-prediction module in {model.path} lacks weights "
                f"({missing[0] if missing else NORM!r} is one): download it again."
            )
        self._sparse = any("_exps." in name for name in inside)
        self._alone = GGUFModel(model.path, self._values(), {**inside, **self._table(), NORM: norm})

    def _lacks(self, name: str) -> bool:
        return f"{name}.weight" not in self._around

    def _values(self) -> dict[str, Any]:
        """What the file says of a model of one layer, without its tokens."""
        family, count = self._model.architecture, self._model.number("block_count")
        values = {
            name: value[-1:] if isinstance(value, np.ndarray) and len(value) == count else value
            for name, value in self._model.values.items()
            if not name.startswith("tokenizer.")
        }
        of_layer = {
            "block_count": 1,
            "attention.recurrent_layers": ATTENDS,
            "leading_dense_block_count": 0 if self._sparse else 1,
        }
        return {**values, **{f"{family}.{name}": value for name, value in of_layer.items()}}

    def _table(self) -> dict[str, StoredTensor]:
        table = self._model.tensors.get(TABLE)
        if table is None:
            return {}  # whoever makes the configuration says so
        rows = table.rows[:FEW]
        return {TABLE: replace(table, shape=(len(rows), *table.shape[1:]), raw=rows.flatten())}

    def made(self) -> NextN:
        """Returns the module."""
        config = config_of(self._alone)
        built: Any = empty_model(config, self._into.dtype, attention_for(config))
        filled(self._alone, built, self._into.dtype, self._into.packed)
        decoder = built.get_decoder()
        norm, processor = last_norm(decoder), layout_of(self._model.architecture, config)
        joined = (config.hidden_size, 2 * config.hidden_size)
        return NextN(
            self._norm(norm, "enorm", processor),
            self._norm(norm, "hnorm", processor),
            self._matrix(self._around["eh_proj.weight"], joined),
            NextNLayers(decoder),
            embed=self._own("embed_tokens.weight", TABLE),
            head=self._own("shared_head_head.weight", OUTPUT),
        )

    def _norm(self, like: nn.Module, part: str, processor: Any) -> nn.Module:
        stored = self._around[f"{part}.weight"]
        made: Any = copy.deepcopy(like)
        self._check(stored, tuple(made.weight.shape))
        found = processor.process(
            weights=numbers_of(stored),
            name=stored.name,
            tensor_key_mapping={stored.name.removesuffix(".weight"): "norm.weight"},
            parsed_parameters={"tensors": {}},
        ).weights
        numbers = torch.from_numpy(np.array(found, np.float32))
        made.weight = nn.Parameter(numbers.to(self._into.dtype), requires_grad=False)
        return made  # type: ignore[no-any-return]

    def _matrix(self, stored: StoredTensor, shape: tuple[int, int]) -> nn.Module:
        self._check(stored, shape)
        if self._into.packed and stored.kind in KINDS:
            return BlockLinear(blocks_of(stored))
        made = nn.Linear(shape[1], shape[0], bias=False, device="meta")
        made.weight = self._weight(stored)
        return made

    def _own(self, name: str, of_model: str) -> Any:
        """A matrix of a row for each token, where a module has one of its own."""
        stored = self._around.get(name)
        theirs = self._model.tensors.get(of_model) or self._model.tensors.get(TABLE)
        if stored is None or (theirs is not None and _same(stored, theirs)):
            return None
        wanted = self._model.tensors[TABLE].shape
        if of_model == OUTPUT:
            return self._matrix(stored, (wanted[0], wanted[1]))
        self._check(stored, wanted)
        if self._into.packed and stored.kind in KINDS:
            return BlockEmbedding(blocks_of(stored), self._into.dtype, 1.0)
        made = nn.Embedding(wanted[0], wanted[1], device="meta")
        made.weight = self._weight(stored)
        return made

    def _weight(self, stored: StoredTensor) -> nn.Parameter:
        numbers = torch.from_numpy(np.array(numbers_of(stored), np.float32))
        return nn.Parameter(numbers.to(self._into.dtype), requires_grad=False)

    def _check(self, stored: StoredTensor, shape: tuple[int, ...]) -> None:
        if stored.shape != shape:
            raise ModelLoadError(
                f"{stored.name} of the multi-token-prediction module in {self._model.path} has the "
                f"shape {stored.shape}, and what the file says calls for {shape}: download it "
                "again."
            )


def _same(one: StoredTensor, two: StoredTensor) -> bool:
    """Whether two matrices are the same, by some of their rows: files hold copies."""
    if one.kind != two.kind or one.shape != two.shape:
        return False
    step = max(1, one.shape[0] // 64)
    return torch.equal(one.rows[::step], two.rows[::step])
