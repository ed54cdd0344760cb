# make all     set up .venv, then run the workflow
# make figures draw every figure from the rows that are there; measures nothing
# make test    set up .venv, then run the tests
# make lint    style of Python, SQL and workflow
# make report  write RESULTS.md, results/ and the marked tables of other pages from data/recorded
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
	python -m workflow.specification

bundle: $(VENV)/installed
	workflow/bundle.sh wheels

# peers/ and lab/ are installed without the packages that they call.
OURS := $(wildcard peers/pyproject.toml peers/tnp_peers/*.py lab/pyproject.toml \
	lab/tnp_lab/*.py lab/tnp_lab/*.c* lab/tnp_lab/*/*.py lab/tnp_lab/*/*.cu \
	lab/tnp_lab/demos/*.cpp lab/tnp_lab/demos/*.h)
$(VENV)/installed: requirements.txt $(OURS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "tnp needs \
	Python 3.11 or newer, but '$(PYTHON)' is not: name another, as in make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation ./peers ./lab
	rm -rf peers/build lab/build peers/*.egg-info lab/*.egg-info
	touch $@

$(VENV)/installed-dev: requirements-dev.txt $(VENV)/installed
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	touch $@
