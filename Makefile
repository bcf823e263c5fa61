# SPDX-License-Identifier: MIT
#
# The front door. Every target works from a fresh clone and brings what it needs into $(VENV); nothing is
# written outside the clone. GNU make 3.81 (macOS) is enough.

PYTHON ?= python3
VENV ?= .venv
PREFIX ?= /usr/local
# On x86-64 Linux an open range would bring a CUDA build of several GB where a CPU build will do. With a
# package index that serves CPU wheels configured, any version can be named: make TORCH='torch==2.9.0' demo
ifeq ($(shell uname -sm),Linux x86_64)
TORCH ?= torch==2.13.0
else
TORCH ?= torch>=2.5
endif

# Absolute, since recipes may change folders.
venv := $(abspath $(VENV))
py := $(venv)/bin/python
pip := $(py) -m pip install --quiet --disable-pip-version-check
cmake := $(venv)/bin/cmake
library := build/release/libmccl.$(if $(filter Darwin,$(shell uname -s)),dylib,so)
c_files = $(shell find include src tests bench examples -name '*.[ch]' 2>/dev/null)
wheel_inputs := CMakeLists.txt pyproject.toml $(shell find cmake include src bench python -type f \
                  -not -name '*.pyc' 2>/dev/null)

# What is kept under build/ would otherwise land in the home folder or beside the sources.
export ZIG_GLOBAL_CACHE_DIR := $(CURDIR)/build/zig-cache/global
export ZIG_LOCAL_CACHE_DIR := $(CURDIR)/build/zig-cache/local
export MPLCONFIGDIR := $(CURDIR)/build/matplotlib

.PHONY: help
help: ## This list
	@echo 'make TARGET [PYTHON=python3] [VENV=.venv] [TORCH=torch==X] [PREFIX=/usr/local]'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# ---- for everybody ----

.PHONY: demo
demo: $(venv)/.mccl $(venv)/.demo ## Build, install into $(VENV), train the example on 2 local processes
	OMP_NUM_THREADS=1 $(venv)/bin/torchrun --standalone --nproc_per_node=2 examples/train_ddp.py

.PHONY: test
test: test-c test-python ## Everything quick: C tests, then Python tests (at most 10 minutes on 2 cores)

.PHONY: test-c
test-c: release ## The C tests alone
	$(venv)/bin/ctest --test-dir build/release -j 2 --output-on-failure --no-tests=error

.PHONY: test-python
test-python: $(venv)/.mccl $(venv)/.dev ## The Python tests alone
	$(py) -m pytest tests/python -q -m 'not slow and not net'

.PHONY: install
install: release ## Install library, header, pkg-config file and CMake package under PREFIX
	$(cmake) --install build/release --prefix $(PREFIX)

.PHONY: bench
bench: $(venv)/.mccl $(venv)/.bench ## MCCL beside gloo, Open MPI and bare sockets, with verdicts (20 minutes; QUICK=1: 3)
	$(venv)/bin/mccl bench suite $(if $(QUICK),--quick) --out build/bench

# ---- for developers ----

.PHONY: check
check: release $(venv)/.mccl $(venv)/.dev ## Layout, lints, types, layers, sizes, exports, generated docs
	@$(venv)/bin/clang-format --dry-run --Werror $(c_files)
	$(venv)/bin/ruff check .
	$(venv)/bin/ruff format --check .
	$(py) -m mypy
	$(py) scripts/check_layers.py
	$(py) scripts/check_sizes.py
	$(py) scripts/check_exports.py --library $(library)
	$(py) scripts/gen_settings_doc.py --library $(library) --check

.PHONY: format
format: $(venv)/.dev ## Rewrite C and Python files in the project's layout
	@$(venv)/bin/clang-format -i $(c_files)
	$(venv)/bin/ruff check --fix --quiet . ; $(venv)/bin/ruff format .

.PHONY: docs
docs: release ## Write docs/settings.md from the library's table
	$(py) scripts/gen_settings_doc.py --library $(library)

.PHONY: sanitize
sanitize: $(venv)/.dev ## The C tests under ASan + UBSan, then under TSan
	@$(call build,asan,-DMCCL_SANITIZE=address$(comma)undefined)
	@$(call build,tsan,-DMCCL_SANITIZE=thread)
	$(venv)/bin/ctest --test-dir build/asan --output-on-failure --no-tests=error
	$(venv)/bin/ctest --test-dir build/tsan --output-on-failure --no-tests=error

.PHONY: test-net
test-net: $(venv)/.mccl $(venv)/.dev ## Two hosts played by network namespaces (root and iproute2)
	@if [ "$$(id -u)" != 0 ] || ! command -v ip >/dev/null; then \
	    echo 'test-net: skipped: needs root and the command ip (package iproute2) for network namespaces'; \
	    [ "$$CI" != true ]; \
	else \
	    set -x; $(py) -m pytest tests/net -q && $(py) -m pytest tests/python -q -m net; \
	fi

.PHONY: test-torch
test-torch: $(venv)/.mccl $(venv)/.dev ## torch's own backend tests, then DDP, FSDP, DTensor, compile ... against gloo
	$(py) tests/torch/dist_suite.py -n 3
	$(py) tests/torch/dist_suite.py -n 4 --rest
	$(py) tests/torch/dist_suite.py -n 8 --rest
	$(py) -m pytest tests/torch -q

.PHONY: test-contract
test-contract: $(venv)/.mccl $(venv)/.dev ## What each torch since 2.5.1 asks of a backend, read in its wheel (1 GB at first)
	$(py) -m pytest tests/matrix -q

.PHONY: test-matrix
test-matrix: test-contract ## The same, then the Python tests on torch 2.14.1 (several GB on x86-64 Linux)
	$(MAKE) test-python VENV=.venv-2.14 TORCH='torch==2.14.1'

.PHONY: test-reports
test-reports: $(venv)/.mccl $(venv)/.dev ## Faults that users of such libraries have met, one test each (10 GiB of memory)
	$(py) -m pytest tests/reports -q

.PHONY: test-frameworks
test-frameworks: $(venv)/.mccl $(venv)/.frameworks ## Accelerate, Lightning, Trainer, Ray, mpirun ... on 2 processes (needs mpirun)
	$(py) -m pytest tests/frameworks -q

.PHONY: macos
macos: $(venv)/.cross ## Cross-build libmccl.dylib for Apple Silicon and check what it imports
	PYTHON=$(py) scripts/macos_build.sh

.PHONY: test-arm64
test-arm64: $(venv)/.cross ## The reduction kernels for arm64 (NEON), under qemu-user
	PYTHON=$(py) scripts/test_arm64.sh

.PHONY: wheels
wheels: $(venv)/.cross ## The wheels of all platforms, cross-built into build/wheels
	PYTHON=$(py) scripts/build_wheels.sh

.PHONY: clean
clean: ## Remove build/ (and not $(VENV))
	rm -rf build dist

# ---- pieces ----

comma := ,
# $(call build,NAME,OPTIONS): configures and builds in build/NAME.
build = mkdir -p build && \
    { $(cmake) -S . -B build/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(venv)/bin/ninja \
        -DPython3_EXECUTABLE=$(py) $(2) >build/$(1).log || { cat build/$(1).log; exit 1; }; } && \
    $(cmake) --build build/$(1)

.PHONY: release
release: $(venv)/.dev
	@$(call build,release,)

# Stamps in the environment itself, so that another VENV starts afresh.
$(venv)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 9))' || { echo 'MCCL needs Python 3.9 or later: PYTHON=...'; exit 1; }
	$(PYTHON) -m venv $(venv)
	@touch $@

$(venv)/.torch: $(venv)/.created
	@$(py) -c 'import torch' 2>/dev/null || { set -x; $(pip) '$(TORCH)'; }
	@touch $@

$(venv)/.mccl: $(venv)/.torch $(wheel_inputs)
	$(pip) --force-reinstall --no-deps .
	@touch $@

$(venv)/.demo: $(venv)/.torch
	$(pip) scikit-learn
	@touch $@

$(venv)/.bench: $(venv)/.torch
	$(pip) rich matplotlib
	@touch $@

$(venv)/.frameworks: requirements-frameworks.txt $(venv)/.torch
	$(pip) -r requirements-frameworks.txt
	@touch $@

$(venv)/.dev: requirements-dev.txt $(venv)/.created
	$(pip) -r requirements-dev.txt
	@touch $@

$(venv)/.cross: requirements-cross.txt $(venv)/.created
	$(pip) -r requirements-cross.txt
	@touch $@
