"""The bytes that tokens are written for in vocabularies that spell in bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

NAMED = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")
"""How vocabularies of sentencepiece's kind name a byte."""


@cache
def byte_alphabet() -> Mapping[str, int]:
    """Returns the byte that each character of byte-level vocabularies stands for (GPT-2's table).

    >>> byte_alphabet()["\\u0120"]
    32
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {
        **{chr(byte): byte for byte in plain},
        **{chr(0x100 + at): byte for at, byte in enumerate(others)},
    }


def named_byte(name: str) -> bytes | None:
    """Returns the byte that a token names; None for one that names none.

    >>> named_byte("<0x0A>")
    b'\\n'
    """
    found = NAMED.match(name)
    return bytes([int(found[1], 16)]) if found else None


def byte_level(name: str) -> bytes | None:
    """Returns what a token of a byte-level vocabulary spells; None for one that is written with
    other characters."""
    table = byte_alphabet()
    if not all(character in table for character in name):
        return None
    return bytes(table[character] for character in name)
