"""The source of a model, found before it is loaded: a folder, a GGUF file, or a name on the hub."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils._validators import validate_repo_id

from outpace.core.values import shown
from outpace.errors import ModelLoadError
from outpace.targets.hf.gguf.file import check_files, files_in, part_names
from outpace.targets.hf.gguf.header import is_gguf
from outpace.targets.hf.loading.fetched import check_fetched

WEIGHTS = ("*.safetensors", "*.bin")
WHOLE = "model.safetensors"
"""The file that a model is read from, whatever others lie with it."""
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")

MOST_NAMES = 12
"""Files that an error message lists."""

SECONDS = 5.0
"""How long the hub may take to say whether it has a model."""


def check_path(model: str | os.PathLike[str]) -> None:
    """Raises ``ModelLoadError`` where a look at the disk shows that nothing can be loaded.

    It is cheap, so that target and drafter are both checked before the weights of either are read.
    """
    try:
        _check_place(model)
    except OSError as error:  # a folder that may not be entered, or a name that is too long
        raise ModelLoadError(
            f"cannot look for the model {shown(str(model))} ({error.strerror}): name a folder or "
            "file that can be read, or a hub name."
        ) from error


def _check_place(model: str | os.PathLike[str]) -> None:
    path = Path(model)
    if not str(model).strip():
        raise ModelLoadError("the model's name is empty: name a folder, a GGUF file or a hub name.")
    if path.is_dir():
        _check_folder(path)
    elif path.exists() and not is_gguf(path):
        raise ModelLoadError(
            f"{path} is a file: name the folder that holds the saved model, or a GGUF file."
        )
    elif path.exists():
        check_files(path)
    elif path.suffix == ".gguf" and not _file_on_hub(str(model)):
        raise ModelLoadError(
            f"there is no file {str(model)!r}: name a GGUF file that exists, or one on the hub as "
            "organisation/name:file.gguf."
        )
    elif not _is_hub_name(_repository(str(model))):
        raise ModelLoadError(f"there is no folder {str(model)!r}, and no hub name looks like this.")


def locate(model: str) -> str:
    """Returns the folder, the hub name or the GGUF file to load a model from.

    "organisation/name:file.gguf" is a file on the hub, which is downloaded first. A model that was
    downloaded before is loaded from its folder in the cache, without asking the hub. Raises
    ``ModelLoadError`` within seconds where the hub has no such model, or cannot be reached: the
    libraries below try again for half a minute.
    """
    path = Path(model)
    if path.exists():
        only = _only_gguf(path) if path.is_dir() else None
        return model if only is None else str(only)
    if _file_on_hub(model):
        return _downloaded_file(*model.split(":"))
    adapter = try_to_load_from_cache(model, ADAPTER)
    if isinstance(adapter, str):
        _check_no_adapter_in(Path(adapter).parent, model)
    known = downloaded(model)
    if known is not None and _complete(known):
        return str(known)
    if not constants.HF_HUB_OFFLINE:
        _check_on_hub(model)
    elif known is None:
        raise ModelLoadError(
            f"there is no folder {model!r}, no model of this name was downloaded before, and "
            "HF_HUB_OFFLINE forbids to download it: unset that, or name a folder."
        )
    return model


def names_gguf(model: str | os.PathLike[str]) -> bool:
    """Returns whether a path or hub name leads to a GGUF file."""
    path = Path(model)
    try:
        if path.is_dir():
            return _only_gguf(path) is not None
        return is_gguf(path) if path.exists() else _file_on_hub(str(model))
    except OSError:
        return False  # no file that can be read: `check_path` says why


def has_tokenizer(model: str) -> bool:
    """Returns whether a folder holds the files of a tokenizer."""
    return any((Path(model) / name).exists() for name in TOKENIZERS)


def is_pickled(model: str) -> bool:
    """Returns whether the weights in a folder are pickled: there are no others."""
    return not any(Path(model).glob(WEIGHTS[0])) and any(Path(model).glob(WEIGHTS[1]))


def _only_gguf(folder: Path) -> Path | None:
    """Returns the GGUF file of a folder that has no other weights, None if it has none.

    Raises ``ModelLoadError`` for several.
    """
    if any(next(folder.glob(pattern), None) for pattern in WEIGHTS):
        return None
    found = files_in(folder)
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:MOST_NAMES])
        more = f" and {len(found) - MOST_NAMES} more" if len(found) > MOST_NAMES else ""
        raise ModelLoadError(
            f"{folder} holds several GGUF files ({names}{more}): name one of them."
        )
    return found[0] if found else None


def _check_no_adapter_in(folder: Path, name: str) -> None:
    check_no_adapter(name, (file.name for file in folder.iterdir()), folder)


def _check_folder(path: Path) -> None:
    _check_no_adapter_in(path, str(path))
    only = _only_gguf(path)
    if only is not None:
        return check_files(only)
    has_weights = any(next(path.glob(pattern), None) for pattern in WEIGHTS)
    if not (path / "config.json").exists():
        raise ModelLoadError(f"{path} has no config.json: name a folder that holds a saved model.")
    if not has_weights:
        raise ModelLoadError(
            f"{path} has a config.json but no weights ({' or '.join(WEIGHTS)}): download or "
            "save the model again."
        )
    from outpace.targets.hf.loading.files import weight_files  # which imports this module

    check_fetched(weight_files(path))
    check_fetched(path / name for name in TOKENIZERS)


def _repository(model: str) -> str:
    """Returns the hub's part of "organisation/name:file.gguf"."""
    return model.partition(":")[0] if _file_on_hub(model) else model


def _file_on_hub(model: str) -> bool:
    """Whether a name is one of a GGUF file on the hub: "organisation/name:file.gguf"."""
    repository, colon, file = model.partition(":")
    return bool(colon) and file.endswith(".gguf") and "/" in repository and ":" not in file


def _downloaded_file(repository: str, file: str) -> str:
    """Returns a GGUF file of the hub, with all its parts, after downloading what is not there."""
    parts = part_names(file)
    known = [try_to_load_from_cache(repository, part) for part in parts]
    if not all(isinstance(path, str) for path in known):
        if constants.HF_HUB_OFFLINE:
            raise ModelLoadError(
                f"{file!r} of {repository!r} was not downloaded before, and HF_HUB_OFFLINE forbids "
                "to download it: unset that, or name a file."
            )
        names = _names_on_hub(repository)
        if not set(parts) <= set(names):
            raise ModelLoadError(f"{repository!r} has no file {file!r}: {_choose(names)}.")
        what = f"{file!r} of {repository!r}"
        known = [*_download(repository, parts, what, instead="file that is here")]
    return str(known[parts.index(file)])


def _choose(names: Sequence[str]) -> str:
    """Returns how to name one of the GGUF files among the names of a repository's files."""
    files = sorted(name for name in names if name.endswith(".gguf"))
    listed = ", ".join(files[:MOST_NAMES]) + (", ..." if len(files) > MOST_NAMES else "")
    return f"it has {listed}" if files else "it has no GGUF files"


def _is_hub_name(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def downloaded(name: str) -> Path | None:
    """Returns the folder of the hub's cache that holds a model, maybe only in part, or the GGUF
    file there that a name stands for; None where it was not downloaded."""
    repository, _, file = name.partition(":") if _file_on_hub(name) else (name, "", "")
    found = try_to_load_from_cache(repository, file or "config.json")
    if not isinstance(found, str):
        return None
    return Path(found) if file else Path(found).parent


def _complete(folder: Path) -> bool:
    """Returns whether nothing has to be downloaded any more to load a model from its folder."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "auto_map" in config or not has_tokenizer(str(folder)):  # it may need further files
            return False
        whole = (folder / WHOLE).exists()  # which transformers looks for first
        for index in () if whole else INDEXES:
            if (folder / index).exists():
                map_ = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"]
                return all((folder / name).exists() for name in set(map_.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return any(next(folder.glob(pattern), None) for pattern in WEIGHTS)


def _check_on_hub(name: str) -> None:
    """Raises ``ModelLoadError`` unless the hub has a model that can be downloaded."""
    names = _names_on_hub(name)
    check_no_adapter(name, names)
    has_weights = any(Path(each).match(pattern) for each in names for pattern in WEIGHTS)
    if not has_weights and any(each.endswith(".gguf") for each in names):
        raise ModelLoadError(
            f"{name!r} holds GGUF files only: name one of them, as '{name}:FILE' "
            f"({_choose(names)})."
        )


def _names_on_hub(name: str) -> list[str]:
    """Returns the files of a model on the hub; raises ``ModelLoadError`` where there is none."""
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
    return [each.rfilename for each in found.siblings or ()]


# -- adapters (LoRA and its kin) in the place of a model, or in one folder with it -----------------


ADAPTER = "adapter_config.json"
"""The file that describes an adapter, as peft saves it."""

LORA = "a LoRA adapter"

_WEIGHTS = "adapter_model"
"""How the names of the files with an adapter's own weights begin."""

MERGED = (
    "merge it into its model (peft's merge_and_unload, then save_pretrained) and name the merged "
    "model's folder"
)
"""What to do with an adapter that cannot be read."""


def locate_adapter(name: str) -> Path:
    """Returns the folder of an adapter; one on the hub is downloaded first, unless it was before.

    Raises ``ModelLoadError`` where the hub has no such adapter, or cannot be reached.
    """
    path = Path(name)
    if path.exists() or not _is_hub_name(name):
        return path  # whoever reads it says what is wrong with it
    known = try_to_load_from_cache(name, ADAPTER)
    if isinstance(known, str) and any(Path(known).parent.glob(f"{_WEIGHTS}.*")):
        return Path(known).parent
    if constants.HF_HUB_OFFLINE:
        return path
    names = [each for each in _names_on_hub(name) if each == ADAPTER or each.startswith(_WEIGHTS)]
    if ADAPTER not in names:
        raise ModelLoadError(f"{name!r} on the hub holds no adapter: it has no {ADAPTER}.")
    return Path(_download(name, names, f"the adapter {name!r}", instead="folder")[0]).parent


def _download(repository: str, files: Sequence[str], what: str, *, instead: str) -> list[str]:
    """Returns where files of a repository on the hub are, once they are here. what, instead: what
    an error says was to be downloaded, and what may be named instead."""
    try:
        return [hf_hub_download(repository, file) for file in files]
    except Exception as error:  # of the HTTP library, which is another one in each version
        raise ModelLoadError(
            f"cannot download {what} ({error}): check the connection, or name a {instead}."
        ) from error


def check_no_adapter(name: str, files: Iterable[str], folder: Path | None = None) -> None:
    """Raises ``ModelLoadError`` where the files of a model are those of an adapter, or an adapter
    is among them: transformers would apply it where peft is installed and ignore it elsewhere.

    name: what the caller calls the model. folder: where the files are, if they are on this machine.
    """
    names = set(files)
    if ADAPTER not in names:
        return
    kind, base = _described(None if folder is None else folder / ADAPTER)
    if "config.json" in names and any(map(_is_of_a_model, names)):
        raise ModelLoadError(
            f"{name!r} holds a model and {kind} ({ADAPTER}), and does not say which of their two "
            "texts is wanted: move the adapter's files into a folder of their own, which lora=PATH "
            "names if its text is wanted."
        )
    remedy = "name that model, and this folder as lora=PATH" if kind == LORA else MERGED
    raise ModelLoadError(f"{name!r} holds {kind} for {base}, and no model: {remedy}.")


def _is_of_a_model(file: str) -> bool:
    """Whether a file holds weights that are not an adapter's."""
    return file.endswith((".safetensors", ".bin")) and not file.startswith(_WEIGHTS)


def _described(file: Path | None) -> tuple[str, str]:
    """What an adapter is and what it was made for, as far as its file says that."""
    about: Any = {}
    if file is not None:
        with suppress(OSError, ValueError):  # it is an adapter's whatever it says
            about = json.loads(file.read_text(encoding="utf-8"))
    entries = about if isinstance(about, dict) else {}
    kind, base = entries.get("peft_type"), entries.get("base_model_name_or_path")
    lora = kind == "LORA" or not isinstance(kind, str)
    return (
        LORA if lora else f"an adapter of the kind {shown(kind)}",
        f"the model {shown(base)}" if isinstance(base, str) and base else "another model",
    )
