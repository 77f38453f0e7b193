"""The settings of a server: where it listens, whom it lets in, how much it takes."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outpace.core.values import shown
from outpace.errors import ConfigError
from outpace.files import read_text

KEY_VARIABLE = "OUTPACE_API_KEY"
"""Environment variable with API keys, separated by commas."""

LOOPBACK = ("localhost", "127.0.0.1", "::1", "[::1]")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a server.

    model_name: as clients call the model. api_keys: whoever shows one of them is let in; none:
    everybody. allowed_origins: web pages of other origins that may call (CORS). allowed_hosts:
    values of the Host header that are answered; unset: those of this machine where the server
    listens to it alone, so that no web page can reach it under a name of its own.
    max_waiting: texts that may wait for a row; more are refused with status 429. max_per_client:
    texts that one client may have open, waiting or not; None: any number.
    max_body_bytes, request_seconds, max_n: limits of one request. drain_seconds: how long open
    requests may go on after SIGTERM. log_prompts: whether prompts and texts are logged.
    allow_forget: whether clients may have the server forget the texts of earlier requests.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = None
    max_waiting: int = 256
    max_per_client: int | None = None
    max_body_bytes: int = 4 << 20
    request_seconds: float = 600.0
    max_n: int = 64
    drain_seconds: float = 30.0
    log_prompts: bool = False
    playground: bool = True
    allow_forget: bool = False

    def __post_init__(self) -> None:
        limits = ("max_waiting", "max_per_client", "max_body_bytes", "request_seconds", "max_n")
        for name in limits:
            value = getattr(self, name)
            if value is not None and not value > 0:  # nan is neither
                raise ConfigError(f"{name} must be positive, not {value}.")
        if not 0 <= self.drain_seconds <= threading.TIMEOUT_MAX:
            raise ConfigError(
                f"drain_seconds must be in [0, {threading.TIMEOUT_MAX:g}], not "
                f"{self.drain_seconds}."
            )
        for name in self.allowed_hosts or ():
            if "*" in name.removeprefix("*.") and name != "*":
                raise ConfigError(f"a host is a name, '*.name' or '*', not {shown(name)}.")
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port must be in [0, 65535], not {self.port}.")

    @property
    def hosts(self) -> tuple[str, ...]:
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
