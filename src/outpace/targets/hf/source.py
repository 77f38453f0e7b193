"""Where a model is: a folder, or a name on the Hugging Face hub. Looked up before it is loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path

from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils._validators import validate_repo_id

from outpace.errors import ModelLoadError

WEIGHTS = ("*.safetensors", "*.bin")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")

SECONDS = 5.0
"""How long the hub may take to say whether it has a model."""


def check_path(model: str | os.PathLike[str]) -> None:
    """Raises ``ModelLoadError`` where a look at the disk shows that nothing can be loaded.

    It is cheap, so that target and drafter are both checked before the weights of either are read.
    """
    path = Path(model)
    if path.suffix == ".gguf" and path.exists():
        raise _gguf(str(path))
    if path.is_dir():
        _check_folder(path)
    elif path.exists():
        raise ModelLoadError(f"{path} is a file: name the folder that holds the saved model.")
    elif not _is_hub_name(str(model)):
        raise ModelLoadError(f"there is no folder {str(model)!r}, and no hub name looks like this.")


def locate(model: str) -> str:
    """Returns the folder or the hub name to load a model from.

    A model that was downloaded before is loaded from its folder in the cache, without asking the
    hub. Raises ``ModelLoadError`` within seconds where the hub has no such model, or cannot be
    reached: the libraries below try again for half a minute.
    """
    if Path(model).exists():
        return model
    downloaded = _downloaded(model)
    if downloaded is not None and _complete(downloaded):
        return str(downloaded)
    if not constants.HF_HUB_OFFLINE:
        _check_on_hub(model)
    elif downloaded is None:
        raise ModelLoadError(
            f"there is no folder {model!r}, no model of this name was downloaded before, and "
            "HF_HUB_OFFLINE forbids to download it: unset that, or name a folder."
        )
    return model


def has_tokenizer(model: str) -> bool:
    """Returns whether a folder holds the files of a tokenizer."""
    return any((Path(model) / name).exists() for name in TOKENIZERS)


def is_pickled(model: str) -> bool:
    """Returns whether the weights in a folder are pickled: there are no others."""
    return not any(Path(model).glob(WEIGHTS[0])) and any(Path(model).glob(WEIGHTS[1]))


def _check_folder(path: Path) -> None:
    has_weights = any(next(path.glob(pattern), None) for pattern in WEIGHTS)
    if not has_weights and any(path.glob("*.gguf")):
        raise _gguf(str(path))
    if not (path / "config.json").exists():
        raise ModelLoadError(f"{path} has no config.json: name a folder that holds a saved model.")
    if not has_weights:
        raise ModelLoadError(
            f"{path} has a config.json but no weights ({' or '.join(WEIGHTS)}): download or "
            "save the model again."
        )


def _gguf(name: str) -> ModelLoadError:
    return ModelLoadError(
        f"{name} holds GGUF weights, which cannot be read yet: name the model's Hugging Face "
        "folder instead, which has a config.json and *.safetensors files."
    )


def _is_hub_name(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _downloaded(name: str) -> Path | None:
    """Returns the folder of the hub's cache that holds a model, maybe only in part."""
    config = try_to_load_from_cache(name, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def _complete(folder: Path) -> bool:
    """Returns whether nothing has to be downloaded any more to load a model from its folder."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "auto_map" in config or not has_tokenizer(str(folder)):  # it may need further files
            return False
        for index in INDEXES:
            if (folder / index).exists():
                map_ = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"]
                return all((folder / name).exists() for name in set(map_.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return any(next(folder.glob(pattern), None) for pattern in WEIGHTS)


def _check_on_hub(name: str) -> None:
    """Raises ``ModelLoadError`` unless the hub has a model that can be downloaded."""
    try:
        found = HfApi().model_info(name, timeout=SECONDS)
    except GatedRepoError as error:
        raise ModelLoadError(
            f"the hub gives {name!r} only to those who accepted its conditions: accept them on "
            f"https://huggingface.co/{name}, then log in with 'hf auth login'."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"there is neither a folder {name!r} nor a model of this name on the hub: check the "
            "spelling, or log in with 'hf auth login' if it is private."
        ) from error
    except Exception as error:  # of the HTTP library, which is another one in each version
        raise ModelLoadError(
            f"there is no folder {name!r}, and the Hugging Face hub cannot be reached to download "
            f"a model of this name ({error}): check the connection, or name a folder."
        ) from error
    names = [Path(each.rfilename) for each in found.siblings or ()]
    has_weights = any(each.match(pattern) for each in names for pattern in WEIGHTS)
    if not has_weights and any(each.suffix == ".gguf" for each in names):
        raise _gguf(name)
