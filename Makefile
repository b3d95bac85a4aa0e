# One command each. Everything is installed into .venv; nothing outside this folder is touched.
#   make PYTHON=python3.13 demo      builds with another Python
#   make test ARGS="-k registry"     passes ARGS on to pytest

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

PY = $(VENV)/bin/python
MADE = $(VENV)/.made
INSTALLED = $(VENV)/.installed
BUILT = $(VENV)/.built
EXTRAS = $(VENV)/.extras
EXAMPLE = $(VENV)/.example
COMPILED = $(wildcard ds4/*.pyx ds4/core/*.pxi ds4/cpu/*.pyx ds4/cpu/kernels/*.c ds4/cpu/kernels/*.h)

# The lists of requirements in pyproject.toml, so that they stand in one place only.
REQUIREMENTS = $(PY) -c "import sys, tomllib; p = tomllib.load(open('pyproject.toml', 'rb')); \
	e = p['project']['optional-dependencies']; e['build'] = p['build-system']['requires']; \
	print(*(r for name in sys.argv[1:] for r in e[name]), sep='\n')"

.PHONY: help demo test test-example test-cuda bench lint docs example clean

help:
	@echo "make demo          build ds4 into .venv and run four conversations at once on the CPU"
	@echo "make test          build and run all tests               (ARGS=... for pytest)"
	@echo "make test-example  the tests of plugins/ds4-example, among them the conformance suite"
	@echo "make test-cuda     the tests of plugins/ds4-cuda that need no GPU: its kernels run on the CPU"
	@echo "make lint          ruff, mypy, and the type stubs against what was compiled"
	@echo "make bench         run the benchmarks                    (ARGS=... for each)"
	@echo "make docs          write the reference pages of docs/ from the sources"
	@echo "make example       write plugins/ds4-example from the templates of ds4 plugin new"
	@echo "make clean         remove .venv and everything that was built"

demo: $(BUILT)
	$(VENV)/bin/ds4 run --demo

test: $(BUILT) $(EXTRAS) $(EXAMPLE)
	$(PY) -m pytest $(ARGS)

# In its own folder and with its own settings, as its author would.
test-example: $(BUILT) $(EXTRAS) $(EXAMPLE)
	cd plugins/ds4-example && $(abspath $(PY)) -m pytest $(ARGS)

# In a process of its own: the plugin's folder on the path would make it a backend of all other tests.
test-cuda: $(BUILT) $(EXTRAS)
	$(PY) -m pytest plugins/ds4-cuda/tests $(ARGS)

bench: $(BUILT)
	@for script in benchmarks/*.py; do echo "$(PY) $$script $(ARGS)"; $(PY) $$script $(ARGS) || exit 1; done

lint: $(BUILT) $(EXTRAS)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m mypy --strict plugins/ds4-example/ds4_example
	$(PY) -m mypy.stubtest --mypy-config-file pyproject.toml ds4._core ds4.cpu._kernels

docs: $(BUILT)
	$(PY) tools/docs_api.py
	$(PY) tools/docs_reference.py

example: $(BUILT)
	rm -rf plugins/ds4-example
	$(PY) -c "from pathlib import Path; from ds4.cli import skeleton; skeleton.write('example', Path('plugins'))"

clean:
	rm -rf $(VENV) build dist *.egg-info plugins/*/*.egg-info plugins/*/build ds4/*.so ds4/cpu/*.so
	find ds4 tests tools plugins -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# ---------------------------------------------------------------- the environment

$(MADE):
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null || { \
		echo "ds4 needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)." \
			"Name another one: make PYTHON=python3.13 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c "import ensurepip, venv" 2>/dev/null || { \
		echo "'$(PYTHON)' has no venv module. Install it (Debian, Ubuntu: apt install python3-venv)." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(REQUIREMENTS) build > $(VENV)/requirements-build.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -r $(VENV)/requirements-build.txt
	@touch $@

# Without build isolation, so that the compiler's tools are downloaded once and later builds need no network.
$(INSTALLED): $(MADE) pyproject.toml setup.py
	$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation -e .
	@touch $@

# Installing compiles everything; after that only what has changed is compiled again.
$(BUILT): $(INSTALLED) $(COMPILED)
	@if [ -n "$(COMPILED)" ] && [ -n "$$(find $(COMPILED) -newer $(INSTALLED))" ]; then \
		echo "$(PY) setup.py build_ext --inplace"; $(PY) setup.py --quiet build_ext --inplace; fi
	@touch $@

$(EXTRAS): $(MADE) pyproject.toml
	$(REQUIREMENTS) test lint > $(VENV)/requirements-extras.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -r $(VENV)/requirements-extras.txt
	@touch $@

# The example, found through its entry point as any plugin is. Its requirements are ds4's.
$(EXAMPLE): $(INSTALLED) plugins/ds4-example/pyproject.toml
	$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e plugins/ds4-example
	@touch $@
