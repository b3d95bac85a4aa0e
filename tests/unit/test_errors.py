"""Errors carry their data, survive pickling (worker processes), and are all reachable from one base."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from ds4 import errors
from ds4.errors import BatchError, Ds4Error, ModelFormatError, SessionClosedError

ALL = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, Ds4Error)]


def test_data_is_readable_and_shown() -> None:
    error = BatchError("session is already in this batch", item=3, first=1)
    assert (error.item, error.first) == (3, 1)  # type: ignore[attr-defined]
    assert str(error) == "session is already in this batch (item=3, first=1)"
    assert error.message == "session is already in this batch"


def test_text_that_the_sentence_holds_is_not_said_twice() -> None:
    error = errors.BackendUnavailableError("backend far is absent: no driver 3", backend="far", reason="no driver", n=3)
    assert str(error) == "backend far is absent: no driver 3 (n=3)"
    assert error.data == {"backend": "far", "reason": "no driver", "n": 3}


def test_without_data_the_sentence_stands_alone() -> None:
    assert str(ModelFormatError("not a GGUF file")) == "not a GGUF file"


@pytest.mark.parametrize("cls", ALL)
def test_every_error_pickles_and_copies_with_its_data(cls: type[Ds4Error]) -> None:
    error = cls("what happened", where=7, name="x")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is cls
        assert (str(again), again.data, again.where) == (str(error), error.data, 7)


@pytest.mark.parametrize("cls", ALL)
def test_every_error_says_in_its_docstring_when_it_is_raised(cls: type[Ds4Error]) -> None:
    assert cls.__doc__ and cls.__doc__.strip().endswith((".", "__cause__."))
    assert "__doc__" in vars(cls)


def test_callers_can_catch_by_the_builtin_they_expect() -> None:
    assert issubclass(BatchError, ValueError) and issubclass(SessionClosedError, BatchError)
    assert issubclass(errors.MemoryPlanError, MemoryError)
    assert issubclass(errors.NumericError, ArithmeticError)
    assert issubclass(errors.SettingError, ValueError)
    assert not issubclass(errors.StepError, ValueError)


def test_no_error_of_ours_hides_behind_another_base() -> None:
    own = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == "ds4.errors"]
    assert {cls for cls in own if issubclass(cls, Exception) and not issubclass(cls, Warning)} == set(ALL)
