# Each target works alone on a machine with Python 3.11 or newer, a C++ compiler and pip.

VENV := .venv
PYTHON ?=
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CLIENTS := .venv-clients
NATIVE_CODE = $(shell git ls-files 'csrc/*.cpp' 'csrc/*.h' 'tests/native/*.cpp' 'tests/native/*.h')
NATIVE := pyproject.toml CMakeLists.txt $(wildcard csrc/*/*.cpp csrc/*/*.h)
export PYTHON
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.PHONY: help setup develop clients browser wheel serve test test-slow lint format types sizes hooks architecture sanitize sanitize-threads clean

help:
	@echo "make setup       create $(VENV), install what serving needs, build the native library"
	@echo "make develop     set up, then install what tests, lint and types need"
	@echo "make clients     create $(CLIENTS): other people's clients, which tests/clients runs"
	@echo "make serve       set up, then serve the bundled model"
	@echo "make browser     the tests of the page, in the Chromium there is"
	@echo "make wheel       build/dist/*.whl: one for every processor and Python of this platform"
	@echo "make test        set up, clients too, then run the test suite but for what is marked slow"
	@echo "make test-slow   the rest of it"
	@echo "make lint types  ruff and formats; mypy"
	@echo "make format      brings Python and native code into their formats"
	@echo "make sizes       lines of code of every part; REVISION=main tells what changed since"
	@echo "make hooks       runs the quick checks before every commit (.pre-commit-config.yaml)"
	@echo "make sanitize    native tests under the address and undefined-behaviour sanitizers; ISAS=generic TESTED=packed are quicker"
	@echo "make sanitize-threads  the same under the thread sanitizer"

# What serving needs; `develop` adds what tests, lint and types need.
setup: $(READY)

develop: $(VENV)/.every-isa $(VENV)/.develop

STEP = $(BIN)/python .ci/step.py
# Python compiles what is imported when it first is: of torch and the rest that is a fifth, and 150 MB less.
PIP = $(BIN)/python -m pip install --progress-bar raw --no-compile

$(BIN)/pip $(CLIENTS)/bin/pip: %/bin/pip:
	@python=$$(./.ci/find-python) && echo "$*: an environment of $$($$python --version)" && \
	{ "$$python" -m venv $* >/dev/null 2>&1 || \
	  { "$$python" -m venv --clear --without-pip $* && "$$python" -m pip --python $*/bin/python install -q pip; }; }

# torch comes first and by itself, so that nothing that depends on it chooses another build. pip goes before, for the
# progress that newer ones tell.
$(VENV)/.runtime: requirements/build.txt requirements/runtime.txt | $(BIN)/pip
	@$(STEP) "pip" $(BIN)/python -m pip install "$$(grep '^pip==' requirements/build.txt)"
	@$(STEP) "torch" $(PIP) "$$(grep '^torch==' requirements/runtime.txt)"
	@$(STEP) "packages" $(PIP) -r requirements/build.txt -r requirements/runtime.txt
	@touch $@

$(VENV)/.develop: requirements/dev.txt $(VENV)/.runtime | $(BIN)/pip
	@$(STEP) "packages for development" $(PIP) -r requirements/dev.txt
	@touch $@

# For this machine's processor alone, which is built in a quarter of the time; tests compare every instruction set.
BUILD = PATH="$(CURDIR)/$(BIN):$$PATH" $(STEP) "native library" $(PIP) -v --no-build-isolation --no-deps -e .
$(READY): $(VENV)/.runtime $(NATIVE)
	@$(BUILD) -C cmake.define.PENSTOCK_ISAS=native
	@touch $@

$(VENV)/.every-isa: $(READY)
	@$(BUILD) -C cmake.define.PENSTOCK_ISAS=
	@touch $@

clients: $(CLIENTS)/.ready

# The list is complete, so there is nothing to resolve.
$(CLIENTS)/.ready: requirements/clients.txt | $(CLIENTS)/bin/pip
	@$(CLIENTS)/bin/python .ci/step.py "other people's clients" $(CLIENTS)/bin/python -m pip install --no-deps -r $<
	@touch $@

# Chromium is the system's own: apt install chromium.
browser: develop requirements/browser.txt
	@$(STEP) "playwright" $(PIP) -r requirements/browser.txt
	$(BIN)/python -m pytest -q tests/browser $(ARGS)

# Every instruction set, and one file for every Python from 3.11 on; the tag says which glibc it needs.
WHEEL = --no-build-isolation --no-deps -w build/wheel/built . -C build-dir=build/wheel -C wheel.py-api=cp311
wheel: $(VENV)/.runtime requirements/wheel.txt
	@$(STEP) "auditwheel" $(PIP) -r requirements/wheel.txt
	@rm -rf build/wheel/built build/dist
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(STEP) "wheel" $(BIN)/python -m pip wheel -v $(WHEEL)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(STEP) "tag" $(BIN)/auditwheel repair -w build/dist build/wheel/built/*.whl
	@ls build/dist/*.whl

serve: setup
	$(BIN)/penstock serve $(ARGS)

test: develop clients
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow" $(ARGS)

test-slow: develop clients
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m slow $(ARGS)

lint: develop
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(NATIVE_CODE)

format: develop
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE_CODE)

types: develop
	$(BIN)/mypy

sizes: develop
	$(BIN)/python .ci/sizes.py $(REVISION)

hooks: develop
	$(BIN)/pre-commit install

architecture: develop
	$(BIN)/python -m pytest -q tests/architecture

CONFIGURE = $(BIN)/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	"-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g1" -DPENSTOCK_PYTHON=OFF

SANITIZED = $(or $(TESTED),attention model_ops native packed ranks recurrent $(if $(ISAS),,tiles))

sanitize: develop
	$(CONFIGURE) -B build/sanitize -DPENSTOCK_SANITIZE=ON "-DPENSTOCK_ISAS=$(ISAS)"
	$(BIN)/cmake --build build/sanitize
	for test in $(SANITIZED); do build/sanitize/$${test}_test || exit 1; done

sanitize-threads: develop
	$(CONFIGURE) -B build/sanitize-threads -DPENSTOCK_SANITIZE_THREADS=ON
	$(BIN)/cmake --build build/sanitize-threads
	for test in build/sanitize-threads/*_test; do $$test || exit 1; done

clean:
	rm -rf build $(VENV) $(CLIENTS)
