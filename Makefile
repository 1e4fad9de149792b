# Two commands do everything from a fresh clone: `make demo` and `make test`.
# They need Python >= 3.11 and make; the environment goes to .venv.
#   make demo PYTHON=python3.12      choose the interpreter

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint types unit clean

demo: $(VENV)/.demo
	$(BIN)/xdlm demo

test: lint types unit

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

# Two workers, one thread each: right for two cores, and no harm with more.
unit: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "xdlm needs Python 3.11 or newer; set PYTHON=..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.demo: $(VENV)/.python pyproject.toml constraints.txt
	@echo "installing into $(VENV) (torch is large: a few minutes the first time)"
	$(PIP) -e '.[log]'
	touch $@

$(VENV)/.test: $(VENV)/.python pyproject.toml constraints.txt
	@echo "installing into $(VENV) (torch is large: a few minutes the first time)"
	$(PIP) -e '.[log,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache xdlm-demo
