# `make demo` and `make test` set everything up by themselves: Python 3.11+ and make are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1

.PHONY: demo test prove browser format lint types imports docs site package clean

demo: $(STAMP)  ## the main job, end to end, on this machine's CPU
	rm -rf demo-run
	$(BIN)/windlass demo --dir demo-run
	$(BIN)/windlass report demo-run/run

test: $(STAMP) browser lint types imports  ## what CI runs
	$(BIN)/pytest -m "not prove" -n 2 --dist loadfile

prove: $(STAMP) browser site  ## everything, the long proofs too
	$(BIN)/pytest

browser:  ## the report's page is tested in Debian's Chromium; where none can be had, those tests say so and skip
	@command -v chromium >/dev/null 2>&1 \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 \
	       && apt-get update -qq && apt-get install -y -qq chromium >/dev/null 2>&1; } \
	  || echo "no chromium, and none can be installed: tests of the report's page are skipped"

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

format: $(STAMP)  ## fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## write the generated pages again
	$(BIN)/python docs/generate.py

site: $(STAMP)  ## the documentation as a site that needs no network: site/index.html
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/python docs/build_site.py

package: $(STAMP)  ## wheel and sdist in dist/, and the demo from the wheel in an empty folder
	$(BIN)/python -m build
	$(BIN)/pytest tests/test_support.py

clean:
	rm -rf $(VENV) demo-run build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "windlass needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 …")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,gpu,test]'
	@# For examples/retinanet, out of the others' sight: transformers imports any torchvision that it finds, and beside a
	@# torch without CUDA that fails unless the example has provided torchvision's operators before.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps --upgrade \
	  --target $(VENV)/vision torchvision torchmetrics lightning-utilities faster-coco-eval pillow
	@# Kernels are compiled and interpreted by tests, out of torch's sight, which would look for its GPU.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/triton \
	  'triton>=3.9,<3.10' || echo "no Triton: tests of its kernels are skipped"
	@touch $(STAMP)
