# Every target sets up what it needs in .venv first, and is fast when there is nothing to do.
#
#   PYTHON=python3.12        interpreter that .venv is made with (3.10 to 3.13)
#   TORCH=torch==2.9.1       which torch .venv gets; a change of either makes .venv anew
#   ARGS="-k ragged -x"      further arguments for pytest, flux bench op or tools/mutants.py
#   WORKERS=6                how many tests run side by side (0: one after another); by default two
#                            more than there are cores, 8 at most, as many tests wait
#   STRESS=10                how many times more calls and cases `make stress` runs
#   CMAKE_ARGS=...           further arguments for CMake
#   SET=default ARCHS=90a    which CUDA kernels `make kernels` builds, for which architectures
#   NVSHMEM=0                not libflux_nvshmem, which ranks on several nodes need
#
# PYTHON and TORCH are remembered, so they need to be given only once.

VENV := .venv
-include $(VENV)/made-with.mk
PYTHON ?= $(or $(MADE_WITH_PYTHON),python3)
TORCH ?= $(or $(MADE_WITH_TORCH),torch==2.13.0)

BIN := $(VENV)/bin
STAMPS := build/stamps
WERROR := $(filter %-werror test test-core stress mutants asan,$(MAKECMDGOALS))
NATIVE := $(STAMPS)/native$(if $(WERROR),-werror)
comma := ,
CMAKE := $(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja
CXX_FILES = $(shell find csrc ptx_machine tests benchmarks -name '*.h' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu')
# Directories too: their times change when a file is added or removed.
NATIVE_INPUTS := $(shell find csrc -not -name '.*') CMakeLists.txt setup.py pyproject.toml
EMULATOR_INPUTS := $(shell find $(addprefix ptx_machine/,src gpu nvshmem cudart) -name '*.cpp' -o -name '*.h') ptx_machine/CMakeLists.txt
# ThreadSanitizer of older compilers cannot place its shadow memory where the kernel randomises a lot.
NO_ASLR = $(shell setarch -R true 2>/dev/null && echo setarch -R)

BENCH_OPS := ag_gemm gemm_rs gemm_ar
BENCH_SHAPE := --m 2048 --n 4096 --k 2048 --dtype float32 --nproc 2

# What depends most on torch: schedules, ops on ranks, autograd, torch.library, torch.compile, layers.
CORE_TESTS = $(sort $(wildcard tests/core/test_core_*.py)) $(addprefix tests/,$(addsuffix .py, \
  core/test_schedule core/test_errors cpu/test_ag_gemm cpu/test_gemm_rs cpu/test_gemm_ar \
  cpu/test_functional layers/test_library layers/test_gradcheck layers/test_compile \
  layers/test_layers layers/test_symm_mem_ops runtime/test_dhelix gpu/test_symm_mem project/test_package \
  hosts/test_doctor))

WORKERS := $(shell n=$$(nproc); echo $$((n < 6 ? n + 2 : 8)))
STRESS := 10
# Every file that does more under FLUX_TEST_STRESS.
STRESS_TESTS = $(sort $(shell grep -rlE 'STRESS|stress_only|[*=] ?more|g(pu|pt)_cases' tests --include='test_*.py'))
SET := minimal
ARCHS := 80,90a
NVSHMEM := 1
COMPILE = $(BIN)/python tools/compile_kernels.py --arch $(ARCHS) --out flux/lib/kernels

# Tests start hundreds of processes, which would each compile what they import.
unexport PYTHONDONTWRITEBYTECODE

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
# The steps of the set-up go on side by side; several goals one after the other.
ifeq (1,$(words $(or $(MAKECMDGOALS),help)))
MAKEFLAGS += -j3
else
.NOTPARALLEL:
endif
# Else ninja would look for a share of these jobs.
unexport MAKEFLAGS
.DEFAULT_GOAL := help
.PHONY: help bench test test-core stress mutants emulator docs lint format clients tsan asan check-device kernels emulated-kernels clean distclean FORCE

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

bench: $(NATIVE) ## run the three fused ops next to their unfused baselines, on 2 CPU ranks
	@for op in $(BENCH_OPS); do $(BIN)/flux bench op --op $$op $(BENCH_SHAPE) $(ARGS); done

# What pytest loads before the first test, whichever that is, uses the emulator.
PYTEST_NEEDS := $(NATIVE) $(STAMPS)/emulator

# With CUTLASS there, kernels for the PTX machine are built before a test's time runs.
test: $(PYTEST_NEEDS) ## run the tests, but those of make clients
	@if test -e $(VENV)/cuda-installed; then $(MAKE) -s emulated-kernels; fi
	@$(BIN)/pytest -n $(WORKERS) --ignore tests/clients $(ARGS)

test-core: $(PYTEST_NEEDS) ## run the core tests, which CI does with the oldest and the newest torch
	@$(BIN)/pytest -n $(WORKERS) $(CORE_TESTS) $(ARGS)

stress: $(PYTEST_NEEDS) ## run the longest tests with more calls and cases; make test runs a part
	@FLUX_TEST_STRESS=$(STRESS) $(BIN)/pytest -n $(WORKERS) --timeout 3000 $(STRESS_TESTS) $(ARGS)

# One worker for a file: its ranks import the program once.
clients: $(PYTEST_NEEDS) $(VENV)/clients-installed ## run the tests of real programs, such as Transformers
	@$(BIN)/pytest -n $(WORKERS) --dist loadfile tests/clients $(ARGS)

mutants: $(PYTEST_NEEDS) ## seed faults one by one, and say which test finds each
	@$(BIN)/python tools/mutants.py $(ARGS)

emulator: $(STAMPS)/emulator ## build the PTX machine, which tests run kernels on

docs: $(VENV)/docs-installed ## build the pages of docs/ into build/site; a broken link fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo 'Open build/site/index.html'

lint: $(VENV)/requirements-installed ## check formatting, ruff, mypy and the layers of packages; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/requirements-installed ## format Python and C++, and apply ruff's safe fixes
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

tsan: $(VENV)/requirements-installed ## run the native tests under ThreadSanitizer
	$(CMAKE) -S . -B build/tsan -DFLUX_TSAN=ON -DFLUX_WERROR=ON
	$(BIN)/cmake --build build/tsan
	$(NO_ASLR) $(BIN)/ctest --test-dir build/tsan --output-on-failure --no-tests=error

asan: $(PYTEST_NEEDS) ## run the native tests, and tests of ops, under AddressSanitizer and UBSan
	@$(BIN)/python tools/asan.py $(ARGS)

check-device: $(VENV)/requirements-installed ## compile csrc/core for the GPU (where nvcc is; no GPU needed)
	$(CMAKE) -S . -B build/device -DFLUX_BUILD_PYTHON=OFF -DFLUX_CHECK_DEVICE=ON
	$(BIN)/cmake --build build/device

kernels: $(VENV)/cuda-installed ## build CUDA kernels into flux/lib/kernels (no GPU needed)
	$(COMPILE) --set $(SET) $(ARGS)
	$(if $(filter 1,$(NVSHMEM)),$(COMPILE) --runtime)

emulated-kernels: $(VENV)/cuda-installed $(STAMPS)/emulator ## build kernels that the PTX machine executes
	$(BIN)/python tools/compile_kernels.py --set minimal --arch 80,90a --emulated --out build/emulated-kernels
	$(BIN)/python tools/compile_kernels.py --runtime --emulated --out build/emulated-kernels

clean: ## remove everything that was built; keeps .venv
	rm -rf build dist *.egg-info flux/_C*.so ptx_machine/_machine*.so ptx_machine/gpu/*.so flux/lib .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## the same, and .venv
	rm -rf $(VENV)

# --- set-up -------------------------------------------------------------------------------------

ifneq ($(PYTHON) $(TORCH),$(MADE_WITH_PYTHON) $(MADE_WITH_TORCH))
$(VENV)/made: FORCE
endif
$(VENV)/made:
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
	  sys.exit(None if (3, 10) <= v < (3, 14) else \
	  f"flux needs Python 3.10 to 3.13, but $(PYTHON) is {v[0]}.{v[1]}: use make PYTHON=python3.12")'
	$(PYTHON) -m venv --clear $(VENV)
	@printf '%s\n' 'MADE_WITH_PYTHON := $(PYTHON)' 'MADE_WITH_TORCH := $(TORCH)' > $(VENV)/made-with.mk
	@touch $@

# Not compiled: Python does that for the modules that are imported, which are few of those that torch has.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-compile

$(VENV)/build-installed: $(VENV)/made pyproject.toml tools/requirements.py
	$(BIN)/python tools/requirements.py build > $(VENV)/requirements-build.txt
	$(INSTALL) -q -r $(VENV)/requirements-build.txt
	@touch $@

# To run flux: all that make bench needs.
$(VENV)/run-installed: $(VENV)/build-installed
	$(BIN)/python tools/requirements.py build run > $(VENV)/requirements-run.txt
	$(INSTALL) '$(TORCH)' -r $(VENV)/requirements-run.txt
	@touch $@

# Tests and linters need more: a browser and Megatron-core among others.
$(VENV)/requirements-installed: $(VENV)/build-installed
	$(BIN)/python tools/requirements.py > $(VENV)/requirements.txt
	$(INSTALL) '$(TORCH)' -r $(VENV)/requirements.txt
	@touch $(VENV)/run-installed $@

# Programs that flux runs inside.
$(VENV)/clients-installed: $(VENV)/requirements-installed
	$(BIN)/python tools/requirements.py clients > $(VENV)/requirements-clients.txt
	$(INSTALL) '$(TORCH)' -r $(VENV)/requirements-clients.txt
	@touch $@

# CUTLASS, NVSHMEM, and nvcc where the machine has none.
$(VENV)/cuda-installed: $(VENV)/requirements-installed
	$(BIN)/python tools/requirements.py cuda sass nvshmem \
	  $$(test -x "$${CUDA_HOME:-}/bin/nvcc" || command -v nvcc > /dev/null || echo nvcc) \
	  > $(VENV)/requirements-cuda.txt
	$(INSTALL) -r $(VENV)/requirements-cuda.txt
	@touch $@

$(VENV)/docs-installed: $(VENV)/build-installed
	$(BIN)/python tools/requirements.py docs > $(VENV)/requirements-docs.txt
	$(INSTALL) -q -r $(VENV)/requirements-docs.txt
	@touch $@

# Users' compilers may warn where ours do not, so warnings are errors only when testing. A build that
# passed with them as errors serves for everything. Compiling needs no torch, so it goes on while pip
# installs that.
$(STAMPS)/compiled $(STAMPS)/compiled-werror: $(VENV)/build-installed $(NATIVE_INPUTS)
	@echo 'Building flux._C$(if $(WERROR),$(comma) warnings are errors) ...'
	@mkdir -p $(STAMPS)
	@CMAKE_ARGS="$(if $(WERROR),-DFLUX_WERROR=ON )$${CMAKE_ARGS:-}" \
	  $(BIN)/python setup.py -q build_ext --inplace > build/native.txt 2>&1 || { cat build/native.txt; exit 1; }
	@touch $(STAMPS)/compiled $@

$(STAMPS)/native: $(VENV)/run-installed $(STAMPS)/compiled
$(STAMPS)/native-werror: $(VENV)/requirements-installed $(STAMPS)/compiled-werror
$(STAMPS)/native $(STAMPS)/native-werror:
	@CMAKE_ARGS="$(if $(WERROR),-DFLUX_WERROR=ON )$${CMAKE_ARGS:-}" \
	  $(INSTALL) -q --no-build-isolation --no-deps -e .
	@touch $(STAMPS)/native $@

$(STAMPS)/emulator: $(VENV)/build-installed $(EMULATOR_INPUTS)
	@echo 'Building the PTX machine ...'
	@$(CMAKE) -S ptx_machine -B build/ptx_machine -DPTX_MACHINE_IN_PLACE=ON \
	  -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -Dpybind11_DIR=$$($(BIN)/python -m pybind11 --cmakedir) > /dev/null
	@$(BIN)/cmake --build build/ptx_machine > build/ptx_machine/log.txt || { cat build/ptx_machine/log.txt; exit 1; }
	@mkdir -p $(STAMPS) && touch $@
