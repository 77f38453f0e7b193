"""Stop strings: where a growing text ends, and what of it is safe to show."""

from __future__ import annotations

from bisect import bisect_left


class StopStrings:
    """Finds the first stop string in a growing text, and what of the text is safe to show.

    >>> stop = StopStrings(("END",), include=False)
    >>> stop.find("so it E", 0), stop.safe("so it E"), stop.find("so it ENDs", 6)
    (None, 6, (6, 'END'))
    """

    def __init__(self, strings: tuple[str, ...], include: bool) -> None:
        self._strings = strings
        self._sorted = sorted(strings)
        self._longest = max((len(string) for string in strings), default=0)
        self._include = include

    def find(self, text: str, begin: int) -> tuple[int, str] | None:
        """Returns where to cut the text and why, if a stop string ends after ``begin``.

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
        for begin in range(max(0, len(text) - self._longest + 1), len(text)):
            if self._begins_one(text[begin:]):
                return begin
        return len(text)

    def _begins_one(self, text: str) -> bool:
        """Whether a stop string begins so. Of all strings in their order, the first that does not
        come before the text is the only one that has to be looked at."""
        place = bisect_left(self._sorted, text)
        return place < len(self._sorted) and self._sorted[place].startswith(text)
