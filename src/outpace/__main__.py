"""``python -m outpace``: the command line."""

from __future__ import annotations

from outpace.cli.main import run

if __name__ == "__main__":
    run()
