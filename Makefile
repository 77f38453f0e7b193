# `make demo` and `make test` set everything up by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# As many processes of pytest as there are cores, up to eight.
WORKERS ?= -n auto --maxprocesses 8

# Tests start many processes, and each of them would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test docs gpu oldest ray audit check clients heads clean
.DEFAULT_GOAL := demo

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "outpace needs Python 3.11 or newer; try make PYTHON=python3.11"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)  ## write a text with the bundled pair, then race it against plain decoding
	$(BIN)/outpace generate --compare --presence-penalty 0.3 --frequency-penalty 0.3 < /dev/null

check: $(STAMP)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check  ## everything CI runs; what depends on the processor also as on weaker ones
	$(BIN)/python -m tests.lowered -n 2
	$(BIN)/pytest -q $(WORKERS) --dist worksteal -m "not slow"

docs: $(STAMP)  ## the site, in build/site: no link leads nowhere, what examples import exists; less than a minute
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	$(BIN)/pytest -q tests/test_site.py tests/test_doctests.py tests/test_contributing.py tests/api/test_options_page.py tests/api/test_migration.py

gpu: $(STAMP)  ## drafters, rules and recorded passes with their tiny models on a GPU
	OUTPACE_TEST_DEVICE=cuda $(BIN)/pytest -q $(WORKERS) -m "not slow" tests/engine/test_contract.py tests/draft tests/targets/test_recording.py tests/targets/test_fixed.py tests/targets/test_trees.py
	$(BIN)/pytest -q -m gpu

OLDEST := 5.17.0
oldest: $(STAMP)  ## the tests with the oldest transformers that is supported; OLDEST=5.20.0 for another
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade --target .transformers/$(OLDEST) transformers==$(OLDEST)
	PYTHONPATH=.transformers/$(OLDEST) $(BIN)/pytest -q $(WORKERS) -m "not slow"

ray: $(STAMP)  ## the tests that need Ray, which dev does not install: it is large
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,ray]'
	$(BIN)/pytest -q tests/on_ray

audit: $(STAMP)  ## the whole exactness gate, on tiny models and the bundled pair; the slow tests; a long fuzz; Ray
	$(BIN)/outpace audit distributions --full
	$(BIN)/outpace audit options
	$(BIN)/outpace audit diff
	$(BIN)/outpace audit model --samples 160 -k 4 --temperature 0.8 --top-p 0.95
	$(BIN)/python -m tests.lowered --all -n 2
	$(BIN)/pytest -q $(WORKERS) --dist worksteal -m slow
	OUTPACE_FUZZ=long $(BIN)/pytest -q $(WORKERS) tests/fuzz tests/serve/test_schema.py
	$(MAKE) ray

clients:  ## other programs' clients, which tests/serve/test_clients.py then uses: LangChain, LlamaIndex, Node
	$(PYTHON) -m venv .clients/venv
	.clients/venv/bin/pip install --quiet --disable-pip-version-check -r tests/serve/clients/requirements.txt
	cp tests/serve/clients/package.json .clients/
	npm install --prefix .clients --no-audit --no-fund --no-package-lock

heads: $(STAMP)  ## train every kind of head for the bundled target on its own text: hours on two cores
	$(BIN)/python bundle/heads.py --out build/heads

clean:
	rm -rf $(VENV) .clients .transformers .pytest_cache .mypy_cache .ruff_cache
