"""The parts of the fixture: what makes each of them anew, and what is held against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from . import surface
from .differences import differences, text_differences
from .files import read
from .texts import Case, played

SURFACES: Mapping[str, Callable[[], Any]] = {
    "commands": surface.commands,
    "help": surface.help_texts,
    "methods": surface.method_pages,
    "openapi": surface.openapi,
    "describe": surface.described,
    "names": surface.names,
}
"""By the name of a part, which is that of its file, what makes it."""
BY_LAYOUT = ("help", "methods")
"""Parts that other versions of the packages that lay them out would show otherwise."""
TEXTS, COUNTS = "texts", "counts"


def surface_differences(part: str, now: Any = None) -> Iterator[str]:
    """Yields what is different in a part; ``now``: the part made anew, if it has been."""
    yield from differences(read(part), SURFACES[part]() if now is None else now)


def laid_out_otherwise(part: str) -> str | None:
    """Returns why a part cannot be compared here: other packages would lay it out."""
    recorded = (read(part) or {}).get("versions") if part in BY_LAYOUT else None
    here = surface.versions()
    if recorded in (None, here):
        return None
    return f"recorded with {recorded}, and here are {here}: 'commands' and 'names' are compared"


def recorded_cases() -> list[str]:
    """Returns the names of the cases whose texts are recorded."""
    return list(read(TEXTS) or {})


def case_differences(name: str) -> Iterator[str]:
    """Yields what a case writes otherwise than was recorded."""
    now = played(Case.of(name))
    texts, counts = read(TEXTS), read(COUNTS)
    if "refused" in now or "refused" in texts[name]:
        yield from differences(texts[name], now if "refused" in now else now["texts"])
        return
    yield from text_differences(expected(name, texts), now["texts"])
    yield from differences(counts[name], now["counts"], "counts")


def expected(name: str, texts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the texts that a case should write. Its greedy ones are recorded only where they are
    others than those of plain decoding."""
    own = texts[name]
    return dict(own) if "refused" in own else {**_greedy_of(plain(name), texts), **own}


def shortened(name: str, texts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the texts of a case without those that plain decoding has, too."""
    if name == plain(name):
        return dict(texts[name])
    known = _greedy_of(plain(name), texts)
    return {batch: found for batch, found in texts[name].items() if known.get(batch) != found}


def plain(name: str) -> str:
    """Returns the name of the case in which the same model decodes plainly."""
    case = Case.of(name)
    return Case(case.target, "none").name


def _greedy_of(name: str, texts: Mapping[str, Any]) -> dict[str, Any]:
    return {batch: found for batch, found in texts[name].items() if batch.startswith("greedy")}
