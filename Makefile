# Everything runs in .venv; nothing outside this folder is changed.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
PROMPT ?= What is the capital of France?

.PHONY: help demo test docs check lint types contracts proto proto-check install dev clean

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(STAMP) ## start a local cluster, answer a prompt (PROMPT="..."), print what was verified, stop
	@$(BIN)/genlock demo "$(PROMPT)"

test: $(DEV_STAMP) ## the whole test suite
	@echo "== Running the tests"
	@.ci/tests

docs: $(DEV_STAMP) ## regenerate the references of API and settings, and the list of files, in docs/
	$(BIN)/python .ci/list_files
	$(BIN)/python .ci/api_docs
	$(BIN)/python .ci/settings_docs
	$(BIN)/python .ci/openapi

check: lint types contracts proto-check ## lint, types, import contracts, generated code

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV_STAMP)
	$(BIN)/mypy kvstore model wire prefill decode cluster sim bench

contracts: $(DEV_STAMP)
	$(BIN)/lint-imports

proto: $(DEV_STAMP) ## regenerate genlock/v1 from proto/
	.ci/genproto

proto-check: $(DEV_STAMP)
	@rm -rf .proto-check && .ci/genproto .proto-check 2>/dev/null
	@for f in .proto-check/genlock/v1/*; do cmp "$$f" "genlock/v1/$$(basename "$$f")" || { echo "run: make proto"; exit 1; }; done
	@rm -rf .proto-check && echo "generated code is current"

install: $(STAMP)
dev: $(DEV_STAMP)

$(STAMP): pyproject.toml requirements/models.txt
	@.ci/install "$(PYTHON)" "$(VENV)"
	@touch $@

$(DEV_STAMP): $(STAMP)
	@.ci/install "$(PYTHON)" "$(VENV)" dev
	@touch $@

clean: ## remove the environment and caches
	rm -rf $(VENV) .proto-check .mypy_cache .ruff_cache .pytest_cache .hypothesis
