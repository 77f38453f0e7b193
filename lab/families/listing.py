"""The families that transformers lists, what was found about each, and the page of all findings."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, get_args

import torch
import transformers
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from transformers.models.auto import modeling_auto as auto

from outpace.errors import ConfigError, did_you_mean

Kind = Literal["causal", "speech", "seq2seq", "image-text"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Family(NamedTuple):
    """A family of models, as transformers lists it."""

    family: str
    """The ``model_type`` of its configuration."""
    model: str
    """The name of its class."""
    kind: Kind = "causal"


def listed(only: Iterable[str] | None = None, kinds: Iterable[str] | None = None) -> list[Family]:
    """Returns the families of the installed transformers, by kind and then by name. One whose class
    is listed for speech is not tried as a reader of texts once more.

    only: these types, which may be of several kinds. kinds: unset: all. Raises ``ConfigError`` for
    a type that transformers does not list among these kinds, and for a kind that nobody knows.
    """
    chosen = set(KINDS if kinds is None else kinds)
    for kind in chosen - {*KINDS}:
        raise ConfigError(f"there are no models of kind {kind!r}: give one of {', '.join(KINDS)}.")
    found = [family for kind in KINDS if kind in chosen for family in _of(kind)]
    if chosen >= {"speech", "seq2seq"}:
        heard = {family[:2] for family in found if family.kind == "speech"}
        found = [one for one in found if one.kind != "seq2seq" or one[:2] not in heard]
    if only is None:
        return found
    asked, names = {*only}, {family.family for family in found}
    for name in sorted(asked - names):
        raise ConfigError(
            f"transformers lists no model of type {name!r} ({', '.join(sorted(chosen))})"
            f"{did_you_mean(name, names)}."
        )
    return [family for family in found if family.family in asked]


def _of(kind: Kind) -> list[Family]:
    mapping: Mapping[Kind, Mapping[str, str | tuple[str, ...]]] = {
        "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "speech": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "image-text": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    # Where several classes are listed, from_pretrained picks the first.
    return [
        Family(family, names if isinstance(names, str) else names[0], kind)
        for family, names in sorted(mapping[kind].items())
    ]


# -- what was found about one ------------------------------------------------------------------


Verdict = Literal["identical", "refused", "not built", "not finished", "DIFFERENT"]


@dataclass(frozen=True)
class Finding:
    """A family of models, and what speculation does to its texts.

    ``identical``: every text is the plain one. ``refused``: outpace will not decode the model, and
    ``reason`` says why. ``not built``: no tiny model could be made or run here, and why.
    ``not finished``: decoding took more time or memory than it was given, or its process ended.
    ``DIFFERENT``: a text is another one, or decoding failed: a defect of outpace.
    """

    family: str
    """The ``model_type`` of its configuration."""
    model: str
    """The name of its class."""
    verdict: Verdict
    reason: str = ""
    trees: bool = False
    """Whether drafts may be trees."""
    drafted: int = 0
    """Tokens that the noised copies drafted, in chains and trees."""
    accepted: int = 0
    kind: Kind = "causal"
    dtype: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether a text is another one, or did not come to its end."""
        return self.verdict in ("DIFFERENT", "not finished")


# -- page, JSON, and table for the terminal ----------------------------------------------------


VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
_NEEDED = ("timm", "torchvision")
_HEAD = """\
# Families of models

What speculation does to the greedy texts of every model that transformers {transformers} lists. Made by

    outpace audit families --markdown families.md

{libraries}

Each family is tried with a tiny random model that has its kinds of layers, in float64 where its code knows
it, on three prompts of different length, longer than every window and chunk of attention. transformers' own
greedy `generate` continues them one by one; outpace continues all together and the longest alone, without
drafts, with n-grams, and with a noised copy of the model that drafts chains and trees. No list says what
works: a model is refused by the checks that every model goes through when it is loaded, or when it sees its
first image.

* **identical**: every text is the plain one, token for token.
* **refused**: outpace does not decode such a model; `LLM(...)` says why and what to use instead.
* **not built**: transformers could make or run no tiny model. Nothing is known.
* **not finished**: decoding took more time or memory than a family is given, which proves nothing.
* **DIFFERENT**: a text is another one. That is a defect.
"""
_ABOUT: Mapping[Kind, str] = {
    "causal": """\
## Causal language models

Layers with sliding windows or chunks of attention get masks of their own. Models that count positions by
slots or columns (some with ALiBi, BART's kin) are patched for the time of a pass. The state of recurrent
layers is kept after each drafted token ([recurrent states](recurrent.md)).
""",
    "speech": """\
## Speech

Audio goes to the encoder as Whisper hears it ([encoder-decoders](encoder_decoder.md)). Models that read
audio between the tokens of a prompt are tried with texts alone.
""",
    "seq2seq": """\
## Sequence to sequence

The encoder reads each source once ([encoder-decoders](encoder_decoder.md)). Three sources of different
length are read. What is listed under speech is not tried again.
""",
    "image-text": """\
## Images and text

Two of three prompts show an image ([vision-language models](vision_language.md)). "Texts only": the walk
does not make images in the form that this model takes.
""",
}


def tally(found: Sequence[Finding]) -> dict[str, int]:
    """Returns how many families have each verdict that any has."""
    counts = {verdict: sum(one.verdict == verdict for one in found) for verdict in VERDICTS}
    return {verdict: number for verdict, number in counts.items() if number}


def as_markdown(found: Sequence[Finding]) -> str:
    """Returns the page: how many families, and for each kind a table of what was found."""
    parts = [
        _HEAD.format(transformers=transformers.__version__, libraries=_libraries()),
        f"{_counted(found)}\n",
    ]
    for kind, about in _ABOUT.items():
        if of_kind := [one for one in _sorted(found) if one.kind == kind]:
            parts += [about, _lines(of_kind)]
    return "\n".join(parts)


def _lines(found: Sequence[Finding]) -> str:
    """A table with a line for all families of which the same was found, the most first."""
    alike: dict[tuple[Verdict, str], list[str]] = {}
    for one in found:
        alike.setdefault((one.verdict, _shared(one)), []).append(one.family)
    rows = sorted(alike.items(), key=lambda row: (VERDICTS.index(row[0][0]), -len(row[1])))
    lines = ["| texts | drafts, or the reason | families |", "|---|---|---|"]
    lines += [f"| {verdict} | {told} | {', '.join(of)} |" for (verdict, told), of in rows]
    return "\n".join(lines) + "\n"


def _shared(found: Finding) -> str:
    """What was found, without the family's name and the remedy, so that others can share it."""
    told = _told(found).replace("|", "/")
    if found.verdict != "refused":
        return told
    told = told.replace(f"a model of type {found.family!r}", "it").replace(found.model, "it")
    told = told.removeprefix("it cannot be decoded speculatively")
    told = re.sub("^(: |, because )", "", told).replace("the encoder of it", "its encoder")
    return re.sub(r"[.:] [Uu]se [^.]*\.$", "", told)


def as_dict(found: Sequence[Finding]) -> dict[str, Any]:
    """Returns all that was found, fit for JSON; "ok" where no family has failed."""
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "ok": not any(one.failed for one in found),
        "families": [dataclasses.asdict(one) for one in _sorted(found)],
    }


def as_table(found: Sequence[Finding]) -> Group:
    """Returns what the command prints."""
    table = Table(box=SIMPLE_HEAD)
    for column in ("kind", "family", "class", "texts", "drafts, or the reason"):
        table.add_column(column, overflow="fold")
    for one in _sorted(found):
        table.add_row(one.kind, one.family, one.model, one.verdict, _told(one))
    return Group(table, _counted(found))


def _libraries() -> str:
    """Says which libraries were in reach that some families are made with."""
    there = [f"{name} {version(name)}" for name in _NEEDED if find_spec(name) is not None]
    return (
        f"Some families are made with timm and torchvision; in reach: {', '.join(there) or 'none'}."
    )


def _sorted(found: Sequence[Finding]) -> list[Finding]:
    return sorted(found, key=lambda one: (KINDS.index(one.kind), one.family))


def _counted(found: Sequence[Finding]) -> str:
    counts = ", ".join(f"{number} {verdict}" for verdict, number in tally(found).items())
    return f"{len(found)} families: {counts}."


def _told(found: Finding) -> str:
    if found.verdict != "identical":
        return found.reason
    if not found.trees:
        return f"chains only: {found.reason}"
    return f"chains, trees; {found.reason}" if found.reason else "chains, trees"
