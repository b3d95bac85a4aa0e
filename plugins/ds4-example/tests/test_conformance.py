"""Everything that ds4 asks of a backend, on this one. The suite comes with ds4; there is nothing to add here."""

from ds4.testing import BackendConformance


class TestExample(BackendConformance):
    backend = "example"
