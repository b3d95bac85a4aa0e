"""The conformance suite: holds a backend to the contract and says what it finds. docs/conformance.md is its manual.

    from ds4.testing.conformance import run
    print(run("mine"))

Checks are functions in area modules, listed in `runner`; the pytest class in `ds4.testing` runs the same ones. Models
are generated on the spot: nothing of ds4's own tests is needed.
"""

from ds4.testing.conformance.catalog import AREAS, Case, Check
from ds4.testing.conformance.compare import ConformanceError, NotApplicable
from ds4.testing.conformance.report import Outcome, Report
from ds4.testing.conformance.runner import cases, run

__all__ = [
    "AREAS",
    "Case",
    "Check",
    "ConformanceError",
    "NotApplicable",
    "Outcome",
    "Report",
    "cases",
    "run",
]
