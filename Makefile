# Everything lives in .venv; nothing is installed outside the repository.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

# Three at a time on two cores: one of them has all tests that use Ray, which mostly wait; of the
# others, a file's tests share fixtures, so they stay together (tests/support/one_ray.py).
PARALLEL ?= -n 3 --no-loadscope-reorder
DEMO ?= runs/demo
# Before lint's programs: beside the tests it gives way to Ray's, the longest path.
NICE ?=

.PHONY: demo study bench check quick-tests test all-tests test-all nightly lint docs install clean

demo: install  ## a sweep, six methods at equal ε, an audit and a report, on real reviews
	$(BIN)/dpfp demo --output $(DEMO)

study: install  ## benchmarks/study: hours or days on 2 cores; stopped, it goes on where it was
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/study/run.py --workers 2 --threads 1
	$(BIN)/python benchmarks/study/write_report.py

bench: install  ## benchmarks/RESULTS.md, 25 minutes on two quiet cores; SST2=FOLDER for SST-2's rows
	$(BIN)/python benchmarks/bench.py $(if $(SST2),--data-dir $(SST2))

check: install  ## style, types, and the tests without Ray, a browser or much time; two minutes
	@$(MAKE) --no-print-directory -j2 --output-sync=target lint quick-tests

quick-tests: install
	$(BIN)/pytest -n 2 -m "not ray and not browser and not slow and not nightly"

test: install  ## style, types and the whole test suite, side by side: Ray's tests mostly wait
	@$(MAKE) --no-print-directory -j2 lint all-tests NICE="nice -n 5"

all-tests: install
	$(BIN)/pytest $(PARALLEL)

test-all: test nightly  ## `test`, then chaos, hosts (root) and object stores; many minutes

nightly: install
	$(BIN)/pytest -m nightly

lint: install  ## style, types and the direction of imports
	$(NICE) $(BIN)/ruff check .
	$(NICE) $(BIN)/ruff format --check .
	$(NICE) $(BIN)/mypy
	$(NICE) $(BIN)/lint-imports

docs: install  ## the documentation as a site, in build/site; warnings are errors
	$(BIN)/sphinx-build -q -W --keep-going -c docs/site docs build/site

install: $(STAMP)  ## the package and its tools, at the versions of constraints.txt

# Made last, so an interrupted installation is taken up again by the next `make`.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "dpfp-ray needs Python 3.11 or later, but '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo missing);" \
	       "use: make PYTHON=python3.11" >&2; exit 1; }
	@echo "installing into .venv (about 2 GB, some minutes the first time) ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
	@echo "installed"

clean:  ## remove .venv and what tools left behind; runs/ is kept
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
