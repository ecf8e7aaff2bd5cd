# Needs python3 >= 3.10 (engines: 3.11 to 3.13) and pip. `make demo ARGS="--once --json"` prints nothing of its own.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
FABRIC := $(VENV)/.fabric
ARGS ?=
FUZZ := .venv-fuzz
SECONDS ?= 60

.PHONY: install fabric demo check lint-imports test test-fast test-all fuzz clean
.DEFAULT_GOAL := install

install: $(STAMP)

# --group came with pip 25.1; the pip that a Python brings along may be older.
$(STAMP): pyproject.toml
	@echo "installing deeplink into $(VENV)" >&2
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "deeplink needs Python 3.10 or newer")'
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	@$(VENV)/bin/python -m pip install --quiet --editable . --group dev
	@touch $@

# The libraries of the optional transports: 115 MB to download, 370 MB on disk. Their tests are skipped without.
fabric: $(FABRIC)

$(FABRIC): $(STAMP) tools/fabric.py
	@echo "installing the libraries of the optional transports" >&2
	@$(VENV)/bin/python tools/fabric.py
	@touch $@

demo:
	@$(MAKE) --no-print-directory install >&2
	@$(VENV)/bin/deeplink demo $(ARGS)

check: install
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/python tools/link_types.py
	@$(VENV)/bin/mypy
	@$(MAKE) --no-print-directory lint-imports

# From .types, where the packages lie as they are imported; the folders of the checkout have other names.
lint-imports: install
	@$(VENV)/bin/python tools/link_types.py
	@cd .types && $(CURDIR)/$(VENV)/bin/lint-imports --config $(CURDIR)/pyproject.toml

test: install fabric
	@$(VENV)/bin/pytest -m "not long" --durations=25

test-fast: install
	@$(VENV)/bin/pytest -m "not engine and not long"

test-all: install fabric
	@$(VENV)/bin/pytest

# Its own environment: atheris comes as a wheel for some Pythons only, and nothing else needs it.
fuzz: $(FUZZ)/.installed
	@$(FUZZ)/bin/python tests/fuzz/run.py --seconds $(SECONDS) $(ARGS)

$(FUZZ)/.installed: pyproject.toml
	@test -x $(FUZZ)/bin/python || $(PYTHON) -m venv $(FUZZ)
	@$(FUZZ)/bin/python -m pip install --quiet --editable . "atheris>=2.3" || \
		{ echo "atheris has no wheel for this Python: make fuzz PYTHON=python3.11" >&2; exit 1; }
	@touch $@

clean:
	rm -rf $(VENV) $(FUZZ) .types build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		.import_linter_cache
