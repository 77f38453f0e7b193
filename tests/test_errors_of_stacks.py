"""An error of this library that another process raised is found in what is shown of its stack."""

from __future__ import annotations

import pytest

from outpace.errors import ModelLoadError, error_of_stack

STACK = """The actor died because of an error raised in its creation task, ray::Worker.__init__()
  File "worker.py", line 48, in __init__
    self._llm = LLM(**llm)
outpace.errors.ModelLoadError: there is no folder 'a': name one.
"""


def test_it_is_what_it_was() -> None:
    found = error_of_stack(STACK)
    assert type(found) is ModelLoadError
    assert str(found) == "there is no folder 'a': name one."
    wrapped = "The above exception was the direct cause of the following exception:\nWrapped: it"
    for stack in (f"{STACK}\n{wrapped}", f"{STACK}\n{wrapped}\n{STACK}"):
        assert str(error_of_stack(stack)) == str(found)


@pytest.mark.parametrize(
    "stack",
    [
        "",
        "KeyError: 'a'",
        f"{STACK}\nDuring handling of the above exception, another one occurred:\nKeyError: 'a'",
        "outpace.errors.reason_of: no error",
        "outpace.errors.Unknown: of another version",
    ],
)
def test_others_are_none_of_ours(stack: str) -> None:
    assert error_of_stack(stack) is None
