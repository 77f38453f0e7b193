"""Stop strings: where a growing text ends, and what of it is safe to show."""

from __future__ import annotations


class StopStrings:
    """Finds the first stop string in a growing text, and what of the text is safe to show.

    >>> stop = StopStrings(("END",), include=False)
    >>> stop.find("so it E", 0), stop.safe("so it E"), stop.find("so it ENDs", 6)
    (None, 6, (6, 'END'))
    """

    def __init__(self, strings: tuple[str, ...], include: bool) -> None:
        self._strings = strings
        self._include = include

    def find(self, text: str, begin: int) -> tuple[int, str] | None:
        """Returns where to cut the text and why, if a stop string ends behind ``begin``.

        Of several, the one that ends first counts.
        """
        found = []
        for string in self._strings:
            at = text.find(string, max(0, begin - len(string) + 1))
            if at >= 0:
                found.append((at + len(string), at, string))
        if not found:
            return None
        end, start, string = min(found)
        return (end if self._include else start), string

    def safe(self, text: str) -> int:
        """Returns how many characters no stop string can swallow any more."""
        longest = max((len(string) for string in self._strings), default=0)
        for begin in range(max(0, len(text) - longest + 1), len(text)):
            if any(string.startswith(text[begin:]) for string in self._strings):
                return begin
        return len(text)
