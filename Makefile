# Everything goes into .venv; a stamp says that the installation matches pyproject.toml.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
MODEL ?= smollm2-135m

.PHONY: run test soak lint types check install clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install -qq --constraint constraints.txt --config-settings editable_mode=strict \
		--editable '.[worker,embedded,bench,dev]'
	touch $@

# The demo: answers to the prompts of examples/prompts.jsonl in results.jsonl.
run: $(STAMP)
	$(BIN)/headrace models pull $(MODEL)
	$(BIN)/headrace run examples/prompts.jsonl --output results.jsonl --model $(MODEL) --temperature 0

test: $(STAMP)
	$(BIN)/headrace models pull $(MODEL)
	$(BIN)/python -m pytest

# Jobs under faults, and the books at the end. SOAK="--jobs 1000 --minutes 2 --seed 7" makes it shorter, or another one.
SOAK ?=
soak: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m faults.soak $(SOAK)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy -p headrace.shared -p headrace.producer -p headrace.worker

check: lint types test

clean:
	rm -rf .venv build dist *.egg-info
