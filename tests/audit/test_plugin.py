"""The pytest fixture, as somebody elsewhere would use it."""

import pytest

from outpace.audit.gate.gate_trees import FAST
from outpace.audit.pytest_plugin import outpace_audit  # noqa: F401
from outpace.verify.lossless.token import TokenRule

from .defects import DEFECTS, Broken, Swapped, argmax_with_soft_q


def test_an_exact_rule_passes(outpace_audit) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    report = outpace_audit(TokenRule(), shapes=FAST[:2], pairs=5)
    assert {row.rule for row in report.rows} == {"token"}
    outpace_audit(["match", Broken()], drafters=["point"], shapes=FAST[:1], pairs=5)


def test_a_wrong_rule_fails(outpace_audit) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    with pytest.raises(
        pytest.fail.Exception, match=r"broken, drafted iid, chain 1: total variation"
    ):
        outpace_audit(Swapped(), shapes=FAST[:1], pairs=5)


def test_a_wrong_drafter_fails(outpace_audit) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    assert "argmax draft with soft q" in DEFECTS
    with pytest.raises(pytest.fail.Exception, match="drafted mine"):
        outpace_audit("token", drafters={"mine": argmax_with_soft_q}, shapes=FAST[:2], pairs=5)
