# Each target is one line a person could type. Needs root (or sudo) once, for Debian packages and for the lab.
PY := .venv/bin/python
SOURCES := meson.build pyproject.toml $(shell find kvmpool hooks xml systemd -type f -not -path '*/__pycache__/*')

.PHONY: demo test lint bench bench-dataplane build clean test-stacks test-slow

demo: .venv/installed
	@.venv/bin/kvmpool lab demo

test: .venv/installed $(if $(TESTS),,.venv-stacks/installed)
	@PATH="$(CURDIR)/.venv/bin:$$PATH" $(PY) -m $(if $(TESTS),pytest $(TESTS),tests.run)

lint: .venv/installed
	@$(PY) -m pytest tests/test_tidy.py

bench: .venv/installed
	@$(PY) -m tests.bench

bench-dataplane: .venv/installed
	@$(PY) -m tests.bench dataplane

build: .venv/installed

.venv/installed: scripts/install $(SOURCES)
	@scripts/install .venv && touch $@

.venv-stacks/installed: scripts/install-stacks pyproject.toml | .venv/installed
	@scripts/install-stacks .venv-stacks && touch $@

test-stacks: .venv/installed .venv-stacks/installed
	@PATH="$(CURDIR)/.venv/bin:$$PATH" $(PY) -m pytest -m stacks tests/stacks

# A Linux guest in a host in QEMU, both without KVM: an hour and more. Not part of test.
test-slow: .venv/installed
	@PATH="$(CURDIR)/.venv/bin:$$PATH" $(PY) -m pytest -s -m slow_vfio tests/vfio

clean:
	rm -rf .venv .venv-stacks build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
