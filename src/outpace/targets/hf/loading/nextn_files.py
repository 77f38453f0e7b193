"""The weights of multi-token-prediction modules as folders hold them: plain, or in FP8."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from outpace.errors import ModelLoadError, UnsupportedModel, reason_of
from outpace.targets.hf.loading.files import headers, weight_files
from outpace.targets.hf.loading.quantized import dequantized_fp8, fp8_block, scale_of

LIBRARY = "speculators_model_type"
"""The entry that says what a folder of the library `speculators` holds."""
TRAIN = "train one with 'outpace train mtp' and name it as 'model'"


class StoredWeights:
    """The weights in a folder, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.where = {name: file for file in weight_files(folder) for name in headers([file])[0]}
        try:
            about = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):  # a folder with weights alone
            about = {}
        self.of_library = about.get(LIBRARY) == "mtp"
        """Whether the library `speculators` wrote it."""
        self._block = fp8_block(about)

    def read(self, name: str) -> Tensor:
        """Returns the numbers of a weight: those in FP8 are dequantised with their scales."""
        found, scale = self._tensor(name), scale_of(name, self.where)
        if scale is None and found.is_floating_point() and found.element_size() > 1:
            return found
        scales = None if scale is None else self._tensor(scale)
        plain = scales is not None and scales.is_floating_point()  # and no exponents, as in MXFP8
        if scales is None or not plain or found.dtype != torch.float8_e4m3fn:
            raise UnsupportedModel(
                f"the multi-token-prediction module in {self.folder.name} is quantised ({name!r} "
                f"is one of its weights), and is read in plain numbers and in FP8 only: {TRAIN}."
            )
        try:
            return dequantized_fp8(found, scales, self._block)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ModelLoadError(
                f"the scales {scale!r} in {self.folder.name} do not fit their weight "
                f"({reason_of(error)}): download the model again."
            ) from error

    def _tensor(self, name: str) -> Tensor:
        try:
            with safe_open(self.where[name], "pt") as opened:
                found: Tensor = opened.get_tensor(name)
        except Exception as error:  # of the library, which has one of its own
            raise ModelLoadError(
                f"the weights in {str(self.where[name])!r} are damaged or cut short "
                f"({reason_of(error)}): download or save the model again."
            ) from error
        return found

    def same(self, name: str, other: str) -> bool:
        """Whether two matrices are the same, by some of their rows: checkpoints hold copies of the
        target's embeddings and output matrix, which need no memory of their own."""
        if other not in self.where:
            return False
        with safe_open(self.where[name], "pt") as one, safe_open(self.where[other], "pt") as two:
            own, theirs = one.get_slice(name), two.get_slice(other)
            if own.get_shape() != theirs.get_shape():
                return False
            rows = own.get_shape()[0]
            return all(
                torch.equal(own[row : row + 1], theirs[row : row + 1])
                for row in range(0, rows, max(1, rows // 64))
            )
