"""A folder with a head: ``config.json``, which says what it is, and a file with weights."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outpace.errors import ModelLoadError, reason_of
from outpace.files import replacing
from outpace.targets.hf.loading.fetched import check_fetched
from outpace.targets.hf.loading.files import indexed_files

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
"""Which files have which weights, where they are in several."""

CONFIG_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What building a network raises where an entry of its configuration is not what it should be: a
list in the place of a number, no entry at all, a negative size."""

DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""The dtypes that the weights of a network may have in files."""

QUANTIZED = ("_scale", "_packed", "_zero_point", "_scale_inv", ".qweight", ".qzeros", ".scales")
"""Endings of the names that packed weights and their scales have."""

Network = TypeVar("Network", bound=nn.Module)


class HeadFolder:
    """Where a head is, or will be."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_config(self) -> dict[str, Any]:
        """Returns the configuration; ``ModelLoadError`` where there is none."""
        if not self.path.is_dir():
            raise ModelLoadError(f"there is no folder {str(self.path)!r} with a trained head.")
        file = self.path / CONFIG
        try:
            about = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ModelLoadError(
                f"{self.path} has no {CONFIG}: name a folder that 'outpace train' wrote."
            ) from error
        except (OSError, ValueError, RecursionError) as error:
            raise ModelLoadError(
                f"cannot read {file} ({reason_of(error)}): train or copy the head again."
            ) from error
        return about if isinstance(about, dict) else {}

    def read_weights(self, *names: str) -> dict[str, Tensor]:
        """Returns the weights in the first of some files that there is."""
        found = next((self.path / name for name in names if (self.path / name).is_file()), None)
        if found is None and (self.path / INDEX).is_file():
            shards = map(self._read, indexed_files(self.path, self.path / INDEX))
            return {name: each for shard in shards for name, each in shard.items()}
        if found is None:
            raise ModelLoadError(
                f"{self.path} has no {' or '.join(names)}: train or copy the head again."
            )
        return self._read(found)

    def read_tensor(self, file: str, names: Sequence[str]) -> Tensor:
        """Returns the tensor that a file of torch's is, or has under the first of some names."""
        check_fetched([self.path / file])
        try:
            found = torch.load(self.path / file, map_location="cpu", weights_only=True)
        except Exception as error:
            raise self.damaged(error, file) from error
        if isinstance(found, Mapping):
            found = next((found[name] for name in names if name in found), None)
        if not isinstance(found, Tensor):
            raise self.damaged(f"it is no tensor, and has none of the name {names[0]!r}", file)
        return found

    def _read(self, file: Path) -> dict[str, Tensor]:
        check_fetched([file])
        try:
            if file.suffix == ".safetensors":
                return load_file(file)
            return _tensors(torch.load(file, map_location="cpu", weights_only=True))
        except Exception as error:  # torch and safetensors raise all sorts over a damaged file
            raise self.damaged(error, file.name) from error

    def fill(self, head: Network, weights: Mapping[str, Tensor]) -> Network:
        """Returns a network with these weights, in the dtypes that they have. Raises
        ``ModelLoadError`` where they do not fit, are of no dtype that networks compute in, or are
        not all finite."""
        try:
            head.load_state_dict(weights, assign=True)
        except RuntimeError as error:
            if quantized := [name for name in weights if name.endswith(QUANTIZED)]:
                raise ModelLoadError(
                    f"the weights in {self.path} are quantized ({quantized[0]}), and heads are "
                    "read as floats of 16 to 64 bits only: copy one that is not."
                ) from error
            raise self.damaged(error) from error
        for name, weight in head.named_parameters():
            if weight.dtype not in DTYPES:
                kind = str(weight.dtype).removeprefix("torch.")
                raise self.damaged(f"{name} is of the type {kind}, which is not read")
            self.check_numbers(name, weight)
        return head.eval().requires_grad_(False)

    def check_numbers(self, name: str, weight: Tensor) -> None:
        """Raises ``ModelLoadError`` for a weight that is not finite."""
        # The smallest and the largest are found much faster than each is looked at.
        if weight.numel() and not all(bool(end.isfinite()) for end in weight.aminmax()):
            raise self.damaged(f"{name} holds numbers that are not finite")

    def write(self, about: Mapping[str, Any], weights: Mapping[str, Tensor], file: str) -> None:
        """Writes both files, the weights first. Each is replaced at once, so that a reader never
        finds half of one. Raises ``OSError`` where they cannot be written."""
        self.path.mkdir(parents=True, exist_ok=True)
        kept = {name: value.detach().contiguous() for name, value in weights.items()}
        text = json.dumps(about, indent=2) + "\n"
        with replacing(self.path / CONFIG) as config, replacing(self.path / file) as part:
            with saving(self.path / file):
                save_file(kept, part)
            with saving(self.path / CONFIG):
                config.write_text(text, encoding="utf-8")
                shutil.copymode(config, part)  # safetensors lets nobody else read what it writes

    def _at(self, file: str) -> Path:
        """What errors call a file."""
        return self.path / file

    def damaged(self, error: BaseException | str, file: str = "") -> ModelLoadError:
        """Returns the error for weights that cannot be read or do not fit."""
        return ModelLoadError(
            f"the weights in {self._at(file)} are damaged, or not those that "
            f"{self._at(CONFIG).name} describes ({_said(error)}): train or copy the head again."
        )

    @contextmanager
    def describing(self, kind: str) -> Iterator[None]:
        """Returns a context in which a head is built from the configuration. Whatever a wrong entry
        raises there is raised as the ``ModelLoadError`` that names the file."""
        try:
            yield
        except ModelLoadError:
            raise
        except CONFIG_ERRORS as error:
            raise self.unfit(kind, error) from error

    def unfit(self, kind: str, error: BaseException | str) -> ModelLoadError:
        """Returns the error for a configuration that says nothing usable."""
        why = f"it has no entry {error}" if isinstance(error, KeyError) else _said(error)
        return ModelLoadError(
            f"{self._at(CONFIG)} does not describe a head of the kind {kind!r} ({why}): train or "
            "copy the head again."
        )


class UncheckedFolder(HeadFolder):
    """A folder whose weights are mapped to memory and looked at by nobody."""

    def check_numbers(self, name: str, weight: Tensor) -> None:
        """Believes them."""


def _said(error: BaseException | str) -> str:
    """A reason, or the beginning of an error's text: torch says what does not fit in line two."""
    return error if isinstance(error, str) else reason_of(error, lines=2)


def _tensors(found: Any) -> dict[str, Tensor]:
    if not isinstance(found, Mapping) or not all(isinstance(x, Tensor) for x in found.values()):
        raise RuntimeError("not a table of tensors")
    return dict(found)


@contextmanager
def saving(path: Path) -> Iterator[None]:
    """Returns a context in which a file, or several in a folder, are written. Whatever a library
    raises because it cannot write is raised as the ``OSError`` that names the path, so that the
    caller of any writer has a single kind of error to expect."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except Exception as error:
        if not _is_of_a_writer(error):
            raise
        raise OSError(
            errno.EIO,
            f"a file cannot be written ({reason_of(error)}); make room on its disk, or name "
            "another folder",
            str(path),
        ) from error


def _is_of_a_writer(error: Exception) -> bool:
    """Safetensors has an error of its own, torch raises a ``RuntimeError``, and tokenizers a bare
    ``Exception``."""
    return isinstance(error, (SafetensorError, RuntimeError)) or type(error) is Exception
