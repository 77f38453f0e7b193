"""From flags to ``speculative_config``, and JSON flags to dicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outpace.core.trees.tree_shape import MAX_TREE_NODES
from outpace.errors import ConfigError, OutpaceError
from outpace.files import read_text


def speculation(
    speculative_config: str | None,
    draft: str | None,
    method: str | None,
    num_speculative_tokens: str | None,
    verify: str | None,
    bundled: bool,
) -> dict[str, Any] | None:
    """Returns the ``speculative_config`` that the flags ask for; None if they say nothing.

    bundled: no model was named, so that the bundled drafter is at hand.
    """
    config, count = speculative_config, num_speculative_tokens
    flags = {"--draft": draft, "--method": method, "-k": count, "--verify": verify}
    given = [flag for flag, value in flags.items() if value is not None]
    if config is not None:
        if given:
            raise ConfigError(
                f"--speculative-config and {given[0]} exclude each other: put all into the JSON."
            )
        return parse_object("--speculative-config", config, ConfigError)
    tokens = None if count is None else _tokens(count)
    if method == "none" and count is not None:
        raise ConfigError("-k and --method none exclude each other: plain decoding drafts nothing.")
    if method == "draft_model" and draft is None and not bundled:
        raise ConfigError("--method draft_model needs --draft: the drafter's folder or hub name.")
    if not given:
        return None
    named = {"method": method, "model": draft, "num_speculative_tokens": tokens, "verify": verify}
    return {key: value for key, value in named.items() if value is not None}


def _tokens(count: str) -> int | str:
    """Returns what -k asks for: a number of tokens, or "auto"."""
    if count == "auto":
        return count
    try:
        found = int(count)
    except ValueError as error:
        raise ConfigError(f"-k must be a whole number or auto, not {count!r}.") from error
    if found < 1:
        raise ConfigError(
            f"-k must be at least 1, not {found}: for plain decoding use --method none."
        )
    if found > MAX_TREE_NODES:
        raise ConfigError(f"-k must be at most {MAX_TREE_NODES}, not {found}.")
    return found


def parse_object(flag: str, text: str, kind: type[OutpaceError]) -> dict[str, Any]:
    """Returns the JSON object that a flag holds, or that a file (``*.json``) holds whose name it
    is; raises ``kind`` if it is something else."""
    content = read_text(Path(text), flag) if text.endswith(".json") else text
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise kind(f"{flag} is not JSON ({error}).") from error
    if not isinstance(found, dict):
        raise kind(f'{flag} must be a JSON object such as {{"key": value}}, not {text}.')
    return found
