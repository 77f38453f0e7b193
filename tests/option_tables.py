"""Renews the tables of options in the documentation, from the declarations in the code.

    python -m tests.option_tables           # writes them
    python -m tests.option_tables --check   # says which pages are out of date

A table stands between ``<!-- options of WHAT -->`` and ``<!-- end -->``. WHAT is ``LLM``,
``SamplingParams``, ``BeamSearchParams``, ``speculative_config``, ``method NAME``, ``verify NAME``
or ``length NAME``; after a colon, the names of the options that are listed, or ``-NAME`` for all
others.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from outpace.arguments import EngineArgs
from outpace.config import SpeculativeConfig
from outpace.core.beam_params import BeamSearchParams
from outpace.core.options import Option, described
from outpace.core.params import SamplingParams
from outpace.draft.registry import find_drafter
from outpace.policy.lengths.registry import find_length
from outpace.verify.registry import find_rule

DOCS = Path(__file__).parents[1] / "docs"
TABLE = re.compile(
    r"(<!-- options of ([^:\n]+?)(?:: ([^\n]+?))? -->\n).*?(<!-- end -->)", re.DOTALL
)
CLASSES = {
    "LLM": EngineArgs,
    "SamplingParams": SamplingParams,
    "BeamSearchParams": BeamSearchParams,
    "speculative_config": SpeculativeConfig,
}


def outdated() -> Iterator[tuple[Path, str]]:
    """Yields the pages whose tables are not what the code says, with what they have to be."""
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        renewed = TABLE.sub(partial(_renewed, page), text)
        if renewed != text:
            yield page, renewed


def options(what: str, names: str | None) -> list[Option]:
    """Returns the options that a table lists."""
    place, _, name = what.partition(" ")
    kind: Any = CLASSES.get(what)
    if kind is None:
        find: Any = {"method": find_drafter, "verify": find_rule, "length": find_length}[place]
        kind = find(name) if place == "verify" else find(name).Options
    found = {one.name: one for one in described(kind)}
    if names is None:
        return list(found.values())
    if names.startswith("-"):
        left_out = names.replace("-", "").split()
        return [one for name, one in found.items() if name not in left_out]
    return [found[name] for name in names.split()]


def _renewed(page: Path, found: re.Match[str]) -> str:
    begin, what, names, end = found.groups()
    return f"{begin}{table(options(what, names), page)}\n{end}"


def table(listed: list[Option], page: Path) -> str:
    """Returns the table of these options. page: where it will stand, for its links."""
    rows = ["| option | default | |", "|---|---|---|", *(_row(one, page) for one in listed)]
    return "\n".join(rows)


def _row(one: Option, page: Path) -> str:
    default = "needed" if one.needed else f"`{_python(one.default)}`"
    bounds = f" ({one.range})" if one.range else ""
    return f"| `{one.name}` | {default} | {_markdown(one.text, page)}{bounds} |"


def _python(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (str, dict)) else repr(value)


def _markdown(text: str, page: Path) -> str:
    """A docstring in a cell of a table: decisions and pages that it names become links."""
    up = "../" * (len(page.relative_to(DOCS).parts) - 1)
    text = " ".join(text.split()).replace("``", "`").replace("|", "\\|")
    text = re.sub(r"docs/(decisions/0*(\d+)[\w-]*\.md)", rf"[decision \2]({up}\1)", text)
    return re.sub(r"docs/((?:\w+/)?(\w+)\.md)", rf"[\2]({up}\1)", text)


def main() -> int:
    """Writes the tables; with ``--check`` returns 1 where some are out of date."""
    found = list(outdated())
    for page, renewed in found:
        sys.stdout.write(f"{page}\n")
        if "--check" not in sys.argv:
            page.write_text(renewed, encoding="utf-8")
    return int(bool(found) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
