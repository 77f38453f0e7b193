"""pytest plug-in: the exactness gate as a fixture, for rules and drafters written elsewhere.

def test_my_rule(outpace_audit):
    outpace_audit(MyRule())

def test_my_drafting(outpace_audit):
    outpace_audit("token", drafters={"mine": my_drafting})
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # torch is only loaded by tests that use the fixture
    from outpace.audit.gate.enumeration import DistributionReport
    from outpace.verify.base import Rule


@pytest.fixture
def outpace_audit() -> Callable[..., DistributionReport]:
    """A function that enumerates a rule's distribution and fails the test if it is not what the
    rule says.

    It takes one rule or several (objects or names), then what
    `outpace.audit.gate.enumeration.audit_distributions` takes, and returns its report. A lossless
    rule must have the target's distribution to 1e-12, a lossy one a distribution.
    """
    from outpace.audit.gate.enumeration import audit_distributions

    def audit(rules: Rule | str | Iterable[Rule | str], **options: Any) -> DistributionReport:
        chosen = [rules] if isinstance(rules, str) or not isinstance(rules, Iterable) else rules
        report = audit_distributions(chosen, **options)
        if not report.passed:
            pytest.fail(_story(report), pytrace=False)
        return report

    return audit


def _story(report: DistributionReport) -> str:
    rows = [
        f"  {row.rule}, drafted {row.drafted}, {row.shape}: "
        + (row.fault or f"total variation {row.worst_tv:.2g}")
        for row in report.failures
    ]
    return "\n".join(
        [
            f"not the target's distribution (tolerance {report.tolerance:g}, seed {report.seed}):",
            *rows,
        ]
    )
