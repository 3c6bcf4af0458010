# make demo   set up and show OmniLearn on an emulated heterogeneous cluster
# make test   set up and run all tests
# make results   write docs/results.md from docs/results/*.json
# make picture   train on an emulated cluster and take docs/report.png from its report (needs Chromium)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup test lint format demo bench results picture clean

help:
	@sed -n 's/^# //p' Makefile

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a minute the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

test: $(READY)
	$(BIN)/python -m pytest --numprocesses 2 $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: $(READY)
	@$(BIN)/omnilearn demo $(ARGS)

bench: $(READY)
	$(BIN)/omnilearn bench control --json docs/results/control.json

results: $(READY)
	$(BIN)/python -m omnilearn.bench.results $(wildcard docs/results/*.json) > docs/results.md

CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
PICTURE := runs/picture
EMULATE ?= HL8

picture: $(READY)
	@test -n "$(CHROMIUM)" || { echo "make picture needs Chromium: CHROMIUM=/path/to/it"; exit 1; }
	rm -rf $(PICTURE)
	$(BIN)/omnilearn run --emulate $(EMULATE) --log-dir $(PICTURE) docs/picture.py
	$(BIN)/omnilearn report $(PICTURE) -o $(PICTURE)/report.html
	$(CHROMIUM) --headless=new --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir=$(PICTURE)/browser \
		--window-size=1000,1600 --screenshot=docs/report.png file://$(CURDIR)/$(PICTURE)/report.html
	rm -rf $(PICTURE)/browser

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
