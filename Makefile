# make all     set up .venv, then run the workflow
# make figures draw every figure from the rows that are there; measures nothing
# make test    set up .venv, then run the tests
# make lint    style of Python, SQL and workflow
# make report  write RESULTS.md and the tables of README.md from data/recorded
# make record  copy what this machine measured into data/recorded
# make bundle  wheels for a GPU host without network (see workflow/bundle.sh)

PYTHON ?= python3
CORES ?= 2 # gates run side by side; what is timed has all of them
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: all figures test lint record report bundle

all: $(VENV)/installed
	snakemake --cores $(CORES) all

figures: $(VENV)/installed
	snakemake --cores 1 figures

test: $(VENV)/installed
	pytest

lint: $(VENV)/installed-dev
	ruff check .
	ruff format --check .
	snakefmt --check Snakefile workflow/Snakefile workflow/rules
	sqlfluff lint --processes 0 workflow
	python -m workflow.lint

record: $(VENV)/installed
	python -m tnp.store record data/runs data/recorded

report: $(VENV)/installed
	python -m tnp.figures.report

bundle: $(VENV)/installed
	workflow/bundle.sh wheels

# The adapters of peers/ are installed without the packages that they call.
$(VENV)/installed: requirements.txt peers/pyproject.toml $(wildcard peers/tnp_peers/*.py)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "tnp needs \
	Python 3.11 or newer, but '$(PYTHON)' is not: name another, as in make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation ./peers
	rm -rf peers/build peers/*.egg-info
	touch $@

$(VENV)/installed-dev: requirements-dev.txt $(VENV)/installed
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	touch $@
