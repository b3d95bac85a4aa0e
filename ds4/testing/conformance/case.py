"""BackendConformance: the suite as a pytest class. Needs pytest only while pytest runs it; no fixture, no plugin.

from ds4.testing import BackendConformance

class TestMine(BackendConformance):
    backend = "mine"
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from ds4.backend.contract import Backend
from ds4.errors import BackendError, BackendUnavailableError
from ds4.testing.conformance.bench import Bench, registry
from ds4.testing.conformance.catalog import Case
from ds4.testing.conformance.compare import ConformanceError, NotApplicable
from ds4.testing.conformance.runner import cases

CASE = "conformance_case"


class BackendConformance:
    """Subclass it in a test module, with the backend's name or a Backend; every check becomes a test.

    Its tests and internals cannot be redefined: what a backend cannot do is declared in Capabilities.absent and then
    skipped with that reason, and what should not run now is deselected by pytest (-k, -m). Own tests may be added.
    """

    backend: ClassVar[str | Backend]
    """Name of an installed backend, or a Backend."""

    short: ClassVar[bool] = False
    """Fewer models and shorter texts."""

    _bench: ClassVar[Bench | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, own in vars(BackendConformance).items():
            if name in OPEN or (name.startswith("__") and name != "__init_subclass__"):
                continue
            if inspect.getattr_static(cls, name) is not own:
                raise TypeError(
                    f"{cls.__name__} redefines {name} of BackendConformance. A suite that a backend changes proves "
                    "nothing: declare what the backend cannot do in Capabilities.absent, with the reason (the checks "
                    "are then skipped with it), deselect tests with pytest's -k, or give the test another name"
                )
        backend = getattr(cls, "backend", None)
        if backend is not None and not isinstance(backend, str | Backend):
            raise TypeError(f"{cls.__name__}.backend must be a backend's name or a ds4.plugin.Backend, not {backend!r}")

    # ------------------------------------------------------------ pytest's side

    @classmethod
    def setup_class(cls) -> None:
        cls._bench = Bench(cls.backend, short=cls.short)

    @classmethod
    def teardown_class(cls) -> None:
        if cls._bench is not None:
            cls._bench.close()
            cls._bench = None

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One test for every check and model of the area that the test method is named after."""
        import pytest

        if CASE not in metafunc.fixturenames:
            return
        if not hasattr(self, "backend"):
            pytest.fail(f"{type(self).__name__} needs a line such as: backend = 'mine'", pytrace=False)
        area = metafunc.function.__name__.removeprefix("test_")
        reason = self._why_skip(metafunc.config.getoption("ds4_backend", default=[]))
        if reason is None:
            params = [pytest.param(case, id=case.id) for case in cases(short=self.short, areas=(area,))]
        else:
            params = [pytest.param(None, id="all", marks=pytest.mark.skip(reason=reason))]
        metafunc.parametrize(CASE, params)

    def _why_skip(self, asked: list[str]) -> str | None:
        """None if the backend can be tested here and is asked for. An unknown backend is a failure, not a skip."""
        import pytest

        if not isinstance(self.backend, str):
            probe = self.backend.probe()
            return None if probe.available else f"backend {self.backend.name} is not available: {probe.reason}"
        if asked and self.backend not in asked:
            return f"backend {self.backend} was not chosen; use --ds4-backend {self.backend}"
        try:
            registry().choose(self.backend)
        except BackendUnavailableError as absent:
            return absent.message
        except BackendError as error:
            pytest.fail(f"{type(self).__name__}: {error}", pytrace=False)
        return None

    def _run(self, case: Case) -> None:
        import pytest

        __tracebackhide__ = True
        assert self._bench is not None  # setup_class made it
        try:
            case.run(self._bench)
        except NotApplicable as reason:
            pytest.skip(str(reason))
        except ConformanceError as error:
            pytest.fail(f"{case.check.about}\n{error}", pytrace=False)

    # ------------------------------------------------------------ the areas, from the simple to the whole

    def test_lifecycle(self, conformance_case: Case) -> None:
        """Probing, opening, closing, opening again."""
        self._run(conformance_case)

    def test_memory(self, conformance_case: Case) -> None:
        """The memory plan is made before anything is allocated, adds up, and refuses what cannot be."""
        self._run(conformance_case)

    def test_honesty(self, conformance_case: Case) -> None:
        """What is declared works; what is not declared is refused."""
        self._run(conformance_case)

    def test_reference(self, conformance_case: Case) -> None:
        """The numbers of the reference, on every model."""
        self._run(conformance_case)

    def test_fallback(self, conformance_case: Case) -> None:
        """The fallback path and the shared path agree."""
        self._run(conformance_case)

    def test_chunks(self, conformance_case: Case) -> None:
        """How a text is cut into steps changes nothing."""
        self._run(conformance_case)

    def test_boundaries(self, conformance_case: Case) -> None:
        """Windows, pages and compressed entries begin and end where they should."""
        self._run(conformance_case)

    def test_steps(self, conformance_case: Case) -> None:
        """Ragged and mixed steps of many sessions."""
        self._run(conformance_case)

    def test_laws(self, conformance_case: Case) -> None:
        """Together equals alone; restored equals never stopped; fork, rewind and resume equal a fresh run."""
        self._run(conformance_case)

    def test_failures(self, conformance_case: Case) -> None:
        """A step that fails has changed nothing."""
        self._run(conformance_case)

    def test_threads(self, conformance_case: Case) -> None:
        """Sessions may be driven from any thread."""
        self._run(conformance_case)


OPEN = ("backend", "short", "_bench")
"""What subclasses set."""
