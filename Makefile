# Bare `make` lists the verbs. Everything runs in .venv, which the first verb makes.
.DEFAULT_GOAL := help
.PHONY: help demo serve dev test exactness golden gpu sanitize lint type ci bench bench-plot format clean run-venv

MAKEFLAGS += --no-print-directory
PORT ?= 8000
BIN := .venv/bin

help:
	@echo 'make demo              see it work: starts the server on the tiny bundled model, streams one answer, ends'
	@echo 'make serve [PORT=8000] the same server, kept running until Ctrl-C'
	@echo 'make test [ARGS=...]   run the tests (ARGS goes to pytest, e.g. ARGS="-k plan -x")'
	@echo 'make exactness         the long versions: speculative = plain over 2,000 tokens a width, a million draws'
	@echo 'make bench [ARGS=...]  measure the server: seconds to ready, memory, tokens/s (ARGS="--csv" appends a row)'
	@echo 'make bench-plot        draw the GPU tables of tools/speed as SVG in docs/'
	@echo 'make golden [ARGS=...] the engine against the model authors'"'"' own data, one line an item'
	@echo 'make gpu [ARGS=...]    the device tests; a machine without a GPU fails them (UF_GPU_QUICK=1: short)'
	@echo 'make sanitize          compute-sanitizer over one decode step of each width, on a GPU'
	@echo 'make lint              ruff (rules and format) and the import contracts of the rooms'
	@echo 'make type              mypy, strict'
	@echo 'make ci                what .ci/run does: lint, types, tests'
	@echo 'make format            let ruff format and fix what it can'
	@echo 'make dev               only prepare .venv with everything for tests'
	@echo 'make clean             remove .venv, caches and build folders'

run-venv:
	@sh tools/venv.sh run

dev:
	@sh tools/venv.sh dev

demo: run-venv
	@$(BIN)/python -m ultraflash.tools.demo $(ARGS)

serve: run-venv
	@exec $(BIN)/python -m ultraflash.server --port $(PORT) $(ARGS)

test: dev
	@$(BIN)/pytest $(ARGS)

exactness: dev
	@UF_EXACTNESS=1 $(BIN)/pytest tests/runtime/test_speculation.py tests/graphs/test_speculation_statistics.py $(ARGS)

golden: run-venv
	@$(BIN)/python -m ultraflash.tools.check_golden tests/golden/tiny-a $(ARGS)

gpu: dev
	@UF_REQUIRE_GPU=1 $(BIN)/pytest -m gpu tests/gpu tests/runtime/test_reuse.py $(ARGS)

sanitize: dev
	@$(BIN)/python tests/gpu/sanitize.py $(ARGS)

lint: dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@PYTHONPATH=.typing $(BIN)/lint-imports

type: dev
	@$(BIN)/mypy
	@$(BIN)/mypy tests

ci:
	@bash .ci/run

bench: run-venv
	@$(BIN)/python -m ultraflash.tools.bench_serve $(ARGS)

bench-plot: run-venv
	@$(BIN)/python -m ultraflash.tools.bench_plot $(ARGS)

format: dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf .venv .venv.lock .typing build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
