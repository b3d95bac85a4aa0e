"""The conformance suite on ds4's own backends; plugins run it in their own tests."""

from __future__ import annotations

from ds4.testing import BackendConformance


class TestCpu(BackendConformance):
    backend = "cpu"


class TestNull(BackendConformance):
    backend = "null"
