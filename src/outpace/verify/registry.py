"""Rules by name, ours and those that other packages register."""

from __future__ import annotations

import inspect
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from outpace.errors import ConfigError, did_you_mean
from outpace.verify.base import Rule
from outpace.verify.lossless.block import BlockRule
from outpace.verify.lossless.canonical import CanonicalRule
from outpace.verify.lossless.coupled import CoupledRule
from outpace.verify.lossless.kseq import KSeqRule
from outpace.verify.lossless.match import MatchRule
from outpace.verify.lossless.recursive import RecursiveRule
from outpace.verify.lossless.token import TokenRule
from outpace.verify.lossless.traversal import TraversalRule
from outpace.verify.lossy.bild import BildRule
from outpace.verify.lossy.cascade import CascadeRule
from outpace.verify.lossy.confidence import ConfidenceRule
from outpace.verify.lossy.ears import EarsRule
from outpace.verify.lossy.joint import JointRule
from outpace.verify.lossy.judge import JudgeRule
from outpace.verify.lossy.lenient import LenientRule
from outpace.verify.lossy.reflective import ReflectiveRule
from outpace.verify.lossy.typical import TypicalRule

GROUP = "outpace.rules"
"""Entry-point group in which other packages name their `Rule` subclasses."""

OWN: tuple[type[Rule], ...] = (
    TokenRule,
    MatchRule,
    CoupledRule,
    BlockRule,
    RecursiveRule,
    KSeqRule,
    TraversalRule,
    CanonicalRule,
    LenientRule,
    EarsRule,
    TypicalRule,
    JointRule,
    BildRule,
    ConfidenceRule,
    JudgeRule,
    ReflectiveRule,
    CascadeRule,
)


def rules() -> dict[str, type[Rule]]:
    """Returns all rules by name, in the order of the documentation."""
    found = {rule.name: rule for rule in OWN}
    for entry in _registered():
        if entry.name in found:
            raise ConfigError(f"rule {entry.name!r} of {entry.value} has the name of another rule.")
        found[entry.name] = entry.load()
    return found


@cache
def _registered() -> tuple[EntryPoint, ...]:
    """Reading the metadata of every installed package takes milliseconds."""
    return tuple(entry_points(group=GROUP))


def find_rule(name: str) -> type[Rule]:
    """Returns the rule of this name; ``ConfigError`` with a suggestion if there is none."""
    known = rules()
    if name not in known:
        raise ConfigError(f"unknown verify rule {name!r}{did_you_mean(name, known)}.")
    return known[name]


def make_rule(name: str, **options: object) -> Rule:
    """Returns the rule of this name with these options.

    Raises ``ConfigError``, with a suggestion, for an unknown name or option, and for a value
    outside its range.

    >>> make_rule("lenient", lenience=0.5)
    LenientRule(lenience=0.5)
    """
    kind = find_rule(name)
    allowed = rule_options(kind)
    for option in options:
        if not allowed:
            raise ConfigError(f"verify={name!r} has no options, and {option!r} was given.")
        if option not in allowed:
            hint = did_you_mean(option, allowed)
            raise ConfigError(f"verify={name!r} has no option {option!r}{hint}.")
    return kind(**options)


def rule_options(rule: type[Rule]) -> dict[str, object]:
    """Returns the rule's options with their defaults; a required one has ``inspect._empty``."""
    if rule.__init__ is object.__init__:
        return {}
    parameters = inspect.signature(rule).parameters
    return {name: parameter.default for name, parameter in parameters.items()}
