"""Running the suite from Python: outcomes, the text, progress, and backends that do not even open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds4.errors import BackendError, LimitsError, MemoryPlanError
from ds4.plugin import DUTIES, LAWS, NUMERICS, Probe
from ds4.testing import FaultyBackend, FaultyRunner, NullBackend, Report, models, run_conformance
from ds4.testing.conformance import AREAS, Outcome, cases, run
from ds4.testing.conformance import runner as suite
from ds4.testing.conformance.bench import Bench


def made(*outcomes: tuple[str, str, str], absent: tuple[str, ...] = ()) -> Report:
    return Report(
        "mine",
        "ds4 1, full form",
        absent,
        tuple(Outcome("laws", name, status, 1.0, said) for name, status, said in outcomes),  # type: ignore[arg-type]
    )


def test_the_null_backend_conforms_without_what_it_lacks() -> None:
    seen: list[tuple[str, int, int]] = []
    report = run_conformance("null", short=True, progress=lambda *args: seen.append(args))
    assert report.ok and report.failed == () and report.backend == "null"
    n = len(cases(short=True))
    assert len(report.outcomes) == n == report.count("passed") + report.count("skipped")
    assert [done for _, done, _ in seen] == list(range(n + 1)) and {total for *_, total in seen} == {n}
    assert seen[0][0] == "lifecycle: probe_answers[small]"
    text = str(report)
    assert "conformance of backend null (ds4 " in text and ", short form)" in text
    assert "declared absent: layout: a slab is a ring of hashes" in text
    assert "null conforms, without reference, layout, cancel: " in text


def test_areas_can_be_chosen() -> None:
    report = run("null", short=True, areas=("memory", "threads"))
    assert [outcome.area for outcome in report.outcomes] == sorted(outcome.area for outcome in report.outcomes)
    assert {outcome.area for outcome in report.outcomes} == {"memory", "threads"}
    with pytest.raises(LimitsError, match="there is no area 'law'; use one of lifecycle, "):
        run("null", areas=("law",))


def test_an_unknown_backend_raises_and_an_absent_one_fails() -> None:
    class Gone(NullBackend):
        name = "gone"

        def probe(self) -> Probe:
            return Probe(False, "not plugged in")

    with pytest.raises(BackendError, match="there is no backend 'nul' \\(did you mean null\\?\\)"):
        run("nul")
    report = run(Gone(), short=True, areas=("lifecycle",))
    assert "probe() says the backend cannot run here: not plugged in" in str(report)


def test_a_backend_that_does_not_open_fails_once() -> None:
    class Shut(NullBackend):
        def open(self, model: Any, limits: Any, options: Any) -> Any:
            try:
                raise OSError("no such device")
            except OSError as error:
                raise MemoryPlanError("cannot", needed=1, available=0) from error

    report = run(Shut(), short=True)
    assert not report.ok
    assert {outcome.area for outcome in report.failed} == {"lifecycle"}
    assert "MemoryPlanError: cannot" in report.failed[0].message
    assert "because of OSError: no such device" in report.failed[0].message
    assert f"raised in {__file__}, line" in report.failed[0].message
    skipped = [outcome for outcome in report.outcomes if outcome.status == "skipped"]
    assert {outcome.message for outcome in skipped} == {"not run: the backend does not open"}


def test_a_backend_that_does_not_close_is_in_the_report() -> None:
    class Stuck(FaultyRunner):
        def close(self) -> None:
            raise OSError("busy")

    class StuckBackend(FaultyBackend):
        def open(self, model: Any, limits: Any, options: Any) -> Any:
            return Stuck(self.inner.open(model, limits, options))

    report = run(StuckBackend(NullBackend()), short=True, areas=("threads",))
    assert not report.ok and "OSError: busy" in str(report)
    late = Bench(StuckBackend(NullBackend()))
    late.alone("small")
    with pytest.raises(BackendError, match="OSError: busy"):
        late.close()


def test_ctrl_c_ends_the_run() -> None:
    class Impatient(NullBackend):
        def probe(self) -> Probe:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Impatient(), short=True)


# ---------------------------------------------------------------- the text


def test_the_report_lists_failures_and_groups_skips() -> None:
    text = str(
        made(
            ("a[small]", "passed", ""),
            ("b[small]", "failed", "one line\n  another"),
            ("c[small]", "skipped", "declared absent: x: y"),
            ("c[pro]", "skipped", "declared absent: x: y"),
            absent=("x: y",),
        )
    )
    assert "  laws        1 passed, 1 failed, 2 skipped" in text
    assert "  skipped laws: c[small] and 1 more: declared absent: x: y" in text
    assert "  laws: b[small]\n    one line\n      another" in text
    assert text.endswith("mine does not conform: 1 passed, 1 failed, 2 skipped, 4.0 s")


def test_of_many_failures_the_first_of_each_area_are_shown_whole() -> None:
    text = str(made(*((f"c{i}[small]", "failed", f"line {i}\ndetail {i}") for i in range(9))))
    assert all(f"line {i}" in text for i in range(9))
    assert "detail 2" in text and "detail 3" not in text


@pytest.mark.parametrize(
    ("statuses", "ok"),
    [
        (("passed",), True),
        (("passed", "skipped"), True),
        (("skipped",), False),
        (("passed", "failed"), False),
        ((), False),
    ],
)
def test_ok_needs_something_passed_and_nothing_failed(statuses: tuple[str, ...], ok: bool) -> None:
    assert made(*((f"c{i}", status, "") for i, status in enumerate(statuses))).ok is ok


# ---------------------------------------------------------------- the list of checks


def test_every_check_that_is_written_is_run() -> None:
    from ds4.testing import conformance
    from ds4.testing.conformance.catalog import Check

    listed = suite.all_checks()
    modules = [getattr(conformance, name) for name in ("cancel", "failures", "honesty", "laws", "lifecycle", "memory")]
    modules += [getattr(conformance, name) for name in ("reference", "steps", "threads")]
    written = {id(value) for module in modules for value in vars(module).values() if isinstance(value, Check)}
    assert written == {id(check) for check in listed}
    assert len({check.name for check in listed}) == len(listed)
    for check in listed:
        assert check.area in AREAS and check.about.endswith("."), check
        assert set(check.short_models) <= set(check.models), check


def test_the_manual_has_every_check_area_and_model() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text(encoding="utf-8")
    for check in suite.all_checks():
        assert f"`{check.name}`" in manual, check.name
    for name in (*AREAS, *(name for name in models.model_names() if not name.startswith(models.DTYPE_PREFIX))):
        assert f"`{name}`" in manual, name
    for name in (*LAWS, *DUTIES, *NUMERICS):
        assert f"`{name}`" in manual, name


def test_names_are_stable_and_unique() -> None:
    for short in (True, False):
        names = [case.id for case in cases(short=short)]
        assert len(set(names)) == len(names)
    assert {case.id for case in cases(short=True)} <= {case.id for case in cases()}
