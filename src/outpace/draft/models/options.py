"""What a user may set of a draft model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from outpace.core.options import option
from outpace.core.values import shown
from outpace.draft.models.sight import check_wanted
from outpace.draft.online.options import ONLINE_HELP, check_learns
from outpace.errors import ConfigError
from outpace.heads.checkpoint import kind_in
from outpace.targets.hf.loading.loaded import check_model
from outpace.targets.hf.loading.source import check_path

AUTO, SAME, INTERSECTION, TEXT = VOCABULARIES = ("auto", "same", "intersection", "text")
"""What ``vocabulary`` may be."""


@dataclass(frozen=True, kw_only=True)
class DraftModelOptions:
    """What a user may set."""

    model: Any = option(None, "The draft model: its folder, hub name, or the loaded model.")
    tokenizer: Any = option(None, "The draft model's tokenizer, if it was loaded without one.")
    processor: Any = option(None, "The draft model's processor, if it was loaded without one.")
    dtype: Any = option(None, "The type of its weights; unset: the target's.")
    device: Any = option(None, "Where it runs: where the target does, as unset.")
    quantization: Any = option(
        "auto", "How its weights are rounded; 'auto': to 8 bits where that saves time; null: not."
    )

    trust_remote_code: bool = option(False, "Whether code that comes with the model may run.")
    vocabulary: str = option(
        AUTO,
        "With another tokenizer: 'intersection' drafts the tokens that both have, 'text' compares "
        "texts, 'same' refuses it; 'auto': as much as is needed.",
    )
    draft_vocab_size: Any = option(
        AUTO,
        "How many tokens it scores, the first of its vocabulary, which are the usual ones: 'auto', "
        "a number, or null for all. It also scores rare ones that a text has had; and all, where "
        "a text has many.",
    )
    images: Any = option(
        AUTO,
        "Whether a vision-language model is shown a prompt's images: 'auto' where it can be, true: "
        "always, or the prompt is refused, false: never.",
    )
    online: Any = option(None, ONLINE_HELP)

    def __post_init__(self) -> None:
        check_wanted(self.images)
        check_learns(self.online, self.quantization)
        check_draft_vocab_size(self.draft_vocab_size)
        if self.online is not None and self.draft_vocab_size not in (AUTO, None):
            raise ConfigError(
                "online and draft_vocab_size exclude each other: a drafter that learns scores all "
                "tokens."
            )
        if self.vocabulary not in VOCABULARIES:
            raise ConfigError(
                f"vocabulary must be one of {', '.join(VOCABULARIES)}, not "
                f"{shown(self.vocabulary)}."
            )
        if self.model is None:
            raise ConfigError("a draft model needs 'model': its folder or hub name.")
        if (kind := kind_in(self.model)) is not None:
            raise ConfigError(
                f"{str(self.model)!r} holds a trained head and no draft model: use it with the "
                f"method {kind!r}."
            )
        check_model(self.model)
        if isinstance(self.model, (str, os.PathLike)):
            check_path(self.model)


def check_draft_vocab_size(size: object) -> None:
    """Raises ``ConfigError`` for what is no number of tokens."""
    number = isinstance(size, int) and not isinstance(size, bool) and size > 0
    if not number and size not in (AUTO, None):
        raise ConfigError(
            f"draft_vocab_size must be a positive number of tokens, 'auto' or null, not "
            f"{shown(size)}."
        )
