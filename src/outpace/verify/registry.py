"""Rules by name, ours and those that other packages register."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outpace.core.lazy import LazyRegistry
from outpace.core.options import make_options

if TYPE_CHECKING:
    from outpace.verify.base import Rule

GROUP = "outpace.rules"
"""Entry-point group in which other packages name their `Rule` subclasses."""

REGISTRY = LazyRegistry(
    "verify rule",
    GROUP,
    {
        "token": "outpace.verify.lossless.token:TokenRule",
        "match": "outpace.verify.lossless.match:MatchRule",
        "coupled": "outpace.verify.lossless.coupled:CoupledRule",
        "block": "outpace.verify.lossless.block:BlockRule",
        "recursive": "outpace.verify.lossless.recursive:RecursiveRule",
        "kseq": "outpace.verify.lossless.kseq:KSeqRule",
        "traversal": "outpace.verify.lossless.traversal:TraversalRule",
        "canonical": "outpace.verify.lossless.canonical:CanonicalRule",
        "lenient": "outpace.verify.lossy:LenientRule",
        "ears": "outpace.verify.lossy:EarsRule",
        "typical": "outpace.verify.lossy:TypicalRule",
        "joint": "outpace.verify.lossy:JointRule",
        "bild": "outpace.verify.lossy:BildRule",
        "confidence": "outpace.verify.lossy:ConfidenceRule",
        "judge": "outpace.verify.lossy:JudgeRule",
        "reflective": "outpace.verify.mixtures:ReflectiveRule",
        "cascade": "outpace.verify.mixtures:CascadeRule",
        "lud": "outpace.verify.lossy:LudRule",
    },
)


def rule_names() -> list[str]:
    """Returns the names of all rules in the order of the documentation; imports none of them."""
    return REGISTRY.names()


def rules() -> dict[str, type[Rule]]:
    """Returns all rules by name, in the order of the documentation."""
    return REGISTRY.all()


def find_rule(name: str) -> type[Rule]:
    """Returns the rule of this name; ``ConfigError`` with a suggestion if there is none."""
    found: type[Rule] = REGISTRY.find(name)
    return found


def make_rule(name: str, **options: object) -> Rule:
    """Returns the rule of this name with these options.

    Numbers of numpy are taken like Python's. Raises ``ConfigError``, with a suggestion, for an
    unknown name or option, and for a value outside its range.

    >>> make_rule("lenient", lenience=0.5)
    LenientRule(lenience=0.5)
    """
    place = f"verify={name!r}"
    unknown, needs = f"{place} has no option {{}}", f"{place} needs {{}}"
    return make_options(find_rule(name), options, unknown, needs, f"{place}: {{}}")
