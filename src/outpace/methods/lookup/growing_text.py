"""The text of one request while it grows, with the places of all its tokens."""

from __future__ import annotations

from outpace.draft.base import Rows
from outpace.methods.lookup.occurrences import Occurrences


class GrowingText:
    """One request: its tokens, and which of them are its prompt."""

    def __init__(self, reach: int) -> None:
        """reach: tokens of a context that are compared at most."""
        self.occurrences = Occurrences(reach)
        self.prompt = 0

    def catch_up(self, rows: Rows, row: int) -> None:
        """Takes over what was committed since."""
        known = len(self.occurrences)
        if known < rows.lengths[row]:
            self.prompt = len(rows.history.prompts[row])
            self.occurrences.extend(rows.since(row, known))

    def last(self, count: int) -> list[int]:
        """Returns the last tokens."""
        end = self.occurrences.end
        return self.occurrences.tokens(end - min(count, len(self.occurrences)), end)

    def output(self) -> list[int]:
        """Returns the tokens after the prompt."""
        return self.last(max(0, len(self.occurrences) - self.prompt))

    @property
    def begin_of_output(self) -> int:
        """The place of the first token after the prompt."""
        return self.occurrences.end - len(self.occurrences) + self.prompt
