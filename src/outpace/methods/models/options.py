"""The options of a draft model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge

from outpace.core.options import Reads
from outpace.core.values import folder
from outpace.errors import ConfigError
from outpace.heads.checkpoint import find_head_kind
from outpace.methods.online.options import WeightsOptions
from outpace.targets.hf.loading.loaded import check_model
from outpace.targets.hf.loading.source import check_path

AUTO, SAME, INTERSECTION, TEXT = "auto", "same", "intersection", "text"
"""What ``vocabulary`` may be."""


def draft_model(name: str, value: Any) -> Any:
    """Returns what may be given as a draft model: a folder, a hub name, or one that is loaded."""
    if (kind := find_head_kind(value)) is not None:
        raise ConfigError(
            f"{str(value)!r} holds a trained head and no draft model: use it with the method "
            f"{kind!r}."
        )
    check_model(value)
    if isinstance(value, (str, os.PathLike)):
        check_path(value)
    return value


@dataclass(frozen=True, kw_only=True)
class DraftModelOptions(WeightsOptions):
    """What a user may set."""

    model: Annotated[Any, Reads(draft_model)]
    """The draft model: its folder, hub name, or the loaded model."""
    tokenizer: Any = None
    """The draft model's tokenizer, if it was loaded without one."""
    processor: Any = None
    """The draft model's processor, if it was loaded without one."""
    dtype: Any = None
    """The type of its weights; unset: the target's."""
    device: Any = None
    """Where it runs, such as "cuda:1"; unset: where the target does."""
    lora: Annotated[str | os.PathLike[str] | None, Reads(folder)] = None
    """A LoRA adapter's folder or hub name: it is merged into the draft model as that is loaded."""
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """In what its keys and values are cached, as for the target."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    vocabulary: Literal["auto", "same", "intersection", "text"] = "auto"
    """With another tokenizer: 'intersection' drafts the tokens that both have, 'text' compares
    texts, 'same' refuses it; 'auto': as much as is needed."""
    draft_vocab_size: Annotated[Literal["auto"] | int | None, Ge(1)] = "auto"
    """How many tokens it scores, the first of its vocabulary, which are the usual ones: 'auto',
    a number, or null for all. It also scores rare ones that a text has had; and all, where a
    text has many."""
    images: Literal["auto"] | bool = "auto"
    """Whether a vision-language model is shown a prompt's images: 'auto' where it can be, true:
    always, or the prompt is refused, false: never."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.online is not None and self.draft_vocab_size not in (AUTO, None):
            raise ConfigError(
                "online and draft_vocab_size exclude each other: a drafter that learns scores all "
                "tokens."
            )
