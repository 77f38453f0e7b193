"""llama.cpp as a contestant, where its binaries and its converter are at hand."""

from __future__ import annotations

import shutil

from outpace.bench.contest import Contestant
from outpace.bench.peers import Models
from outpace.errors import ConfigError

BINARIES = ("llama-server", "llama-quantize")


def contestants(models: Models) -> list[Contestant]:
    """Raises ``ConfigError``: says what is missing, or that the comparison is not built."""
    missing = [name for name in BINARIES if shutil.which(name) is None]
    if missing:
        raise ConfigError(
            f"llama.cpp is not on the PATH ({', '.join(missing)} not found): install it, or leave "
            "'llama.cpp' out of --vs."
        )
    raise ConfigError(
        "llama.cpp runs in another process on GGUF files, which this benchmark cannot pair and "
        "interleave yet: leave 'llama.cpp' out of --vs and time llama-server by itself."
    )
