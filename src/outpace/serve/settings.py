"""The settings of a server: where it listens, whom it lets in, how much it takes."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt, Le

from outpace.core.options import Options
from outpace.core.values import shown
from outpace.errors import ConfigError
from outpace.files import read_text

KEY_VARIABLE = "OUTPACE_API_KEY"
"""Environment variable with API keys, separated by commas."""

LOOPBACK = ("localhost", "127.0.0.1", "::1", "[::1]")


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """Settings of a server."""

    model_name: str
    """Name by which clients call the model."""
    host: str = "127.0.0.1"
    """Listen here; 0.0.0.0: to all."""
    port: Annotated[int, Ge(0), Le(65535)] = 8000
    """Listen at this port; 0: any free one."""
    api_keys: Sequence[str] = ()
    """Whoever shows one of them is let in; none: everybody."""
    allowed_origins: Sequence[str] = ()
    """Web pages of other origins that may call (CORS)."""
    allowed_hosts: Sequence[str] | None = None
    """Values of the Host header that are answered. Unset: those of this machine where the server
    listens to it alone, so that no web page can reach it under a name of its own."""
    max_waiting: Annotated[int, Ge(1)] = 256
    """Texts that may wait; more get status 429."""
    max_per_client: Annotated[int | None, Ge(1)] = None
    """Texts that one client (by API key, else by the field user) may have open; more get status
    429. Unset: as many as there is room for."""
    max_body_bytes: Annotated[int, Ge(1)] = 4 << 20
    """Largest body of a request."""
    request_seconds: Annotated[float, Gt(0)] = 600.0
    """Longest time of a request."""
    max_n: Annotated[int, Ge(1)] = 64
    """Texts that one request may ask for."""
    drain_seconds: Annotated[float, Ge(0), Le(threading.TIMEOUT_MAX)] = 30.0
    """Time that open requests have after SIGTERM."""
    log_prompts: bool = False
    """Write prompts and texts into the log."""
    playground: bool = True
    """Serve the page."""
    allow_forget: bool = False
    """Let clients have the texts of earlier requests forgotten (POST /forget), as outpace bench
    serve does between its runs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.allowed_hosts or ():
            if "*" in name.removeprefix("*.") and name != "*":
                raise ConfigError(f"a host is a name, '*.name' or '*', not {shown(name)}.")

    @property
    def hosts(self) -> Sequence[str]:
        """The values of the Host header that are answered; ("*",) for all."""
        if self.allowed_hosts is not None:
            return self.allowed_hosts
        return LOOPBACK if self.host in LOOPBACK else ("*",)


def read_keys(file: Path | None, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Returns the API keys of a file, one a line, and of the environment; none: everybody may
    call. Lines that begin with # are comments. ``ConfigError`` for a file that cannot be read or
    holds no key, and for a key that no request could show."""
    keys = [key.strip() for key in environment.get(KEY_VARIABLE, "").split(",")]
    if file is not None:
        lines = read_text(file, "API key file", error=ConfigError).splitlines()
        stripped = [line.strip() for line in lines]
        found = [line for line in stripped if line and not line.startswith("#")]
        if not found:
            raise ConfigError(f"{file} holds no API key: write one a line.")
        keys += found
    for key in keys:
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(
                "an API key holds a character that no header of a request can carry (not of "
                "ASCII, or a control character): choose another key."
            )
    return tuple(dict.fromkeys(filter(None, keys)))
