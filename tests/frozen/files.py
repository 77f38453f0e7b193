"""The files in ``recorded/``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "recorded"


def read(name: str) -> Any:
    """Returns what is in a recorded JSON file; None where nothing has been recorded yet."""
    file = RECORDED / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def write(name: str, content: Any) -> None:
    """Writes a JSON file, a line for each value, so that git shows what has changed."""
    RECORDED.mkdir(exist_ok=True)
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    (RECORDED / f"{name}.json").write_text(text, encoding="utf-8")
