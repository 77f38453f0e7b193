"""The flags of a beam search, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from outpace.cli.flags.groups import WHEN, BeamFlags
from outpace.cli.loading import starting
from outpace.errors import ConfigError, ParamsError


def check_search(flags: BeamFlags, compare: bool, config: Mapping[str, Any] | None) -> None:
    """Raises the error of flags that make no sense with a beam search, or without one."""
    if flags.num_beams is None:
        if flags.given:
            raise ParamsError(f"{flags.given[0]} needs --num-beams, which asks for a beam search.")
        return
    if flags.num_beams < 1:
        raise ParamsError(f"--num-beams must be at least 1, not {flags.num_beams}.")
    if flags.early_stopping not in (None, *WHEN):
        raise ParamsError(
            f"--early-stopping must be true, false or never, not {flags.early_stopping!r}."
        )
    if compare:
        raise ParamsError(
            "--compare measures speculation, and beams are decoded plainly: drop it or --num-beams."
        )
    if config is not None and config.get("method") != "none":
        raise ConfigError(
            "--num-beams does not go with a drafter: a beam search draws nothing, so that no rule "
            "can verify drafts against a distribution; drop what asks for one, or --num-beams."
        )


def searching(options: Mapping[str, Any]) -> Callable[..., None]:
    """Returns what searches, with an `LLM` and a `Job`; ``ParamsError`` for bad options."""
    with starting():
        from outpace.cli.generate import params_of, search
    return partial(search, params_of(options))
