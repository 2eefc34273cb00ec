# Every target sets up what it needs in .venv: only Python (3.11 or 3.12) and make must be there.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do $$p -c '' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP_OPTIONS :=
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check $(PIP_OPTIONS)
EXAMPLES := .venv-examples

# Python keeps what it has compiled, as the tests start many processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test environments lint types unit test-families examples test-gpu bench-cpu bench-serving bench-web bench-compare bench-gpu bench-families bench-pagedattention bench-tangram bench-tangram-replay bench-tangram-gpu bench-tangram-devices bench-cluster bench-cluster-overhead bench-cluster-faults bench-avmp bench-hybrid bench-vattention bench-odma clean

demo: $(VENV)/installed
	$(BIN)/python tools/demo.py

# `make -j3 test` runs all three at once.
test: lint types unit

# What `test` needs; `make -j2` installs both at once.
environments: $(VENV)/installed-test $(EXAMPLES)/installed

lint: $(VENV)/installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: $(VENV)/installed-test
	$(BIN)/mypy

# One process a core, and so one thread in each: a third on two cores made it slower. Each begins with
# tests of neighbouring files, which share what they set up, and takes over some of the other's when
# it has done its own.
unit: $(VENV)/installed-test $(EXAMPLES)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal

# Every family in two shapes, both caches, chunks of 1, 11 and 512 tokens, with preemption: the tokens
# of Transformers. `unit` runs a part of it. EVERY_CASE=1 has the same effect on `unit`, where other
# tests run some combinations of their options (tests/cases.py).
test-families: $(VENV)/installed-test
	EVERY_CASE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal tests/engine/test_tokens.py tests/engine/test_windows.py

# Against a server of the bundled model; `unit` runs them too, lm-eval without the tasks that it has itself.
examples: $(VENV)/installed-test $(EXAMPLES)/installed
	EVERY_CASE=1 $(BIN)/python -m pytest tests/serve/test_examples.py

# On a GPU machine: with its own Python, whose torch, triton and cuda-bindings fit its driver. A long
# traceback shows arguments: to print a tensor of an engine that has ended reads addresses without
# pages, and every later test of the process fails.
test-gpu:
	PYTHONPATH=src python3 -m pytest --require-gpu --tb=short tests/gpu tests/kernels

bench-cpu: $(VENV)/installed-test
	$(BIN)/python benchmarks/cpu/run.py

# Streams from a server of the bundled model, by its threads, in about two minutes.
bench-serving: $(VENV)/installed
	$(BIN)/python benchmarks/cpu/serving.py --output benchmarks/cpu/serving.json

# CPU time of the web process for a streamed token, here and in another checkout (BEFORE, as below),
# in turns, in about nine minutes.
bench-web: $(VENV)/installed
	PYTHONPATH=src $(BIN)/python benchmarks/cpu/web.py --before $(BEFORE) --output benchmarks/cpu/web.json

# This checkout and another one, in turns, in about five minutes; BEFORE is the other one's folder:
# git worktree add ../before COMMIT.
bench-compare: $(VENV)/installed-test
	PYTHONPATH=src $(BIN)/python benchmarks/cpu/compare.py --before $(BEFORE) --output benchmarks/cpu/structure.json

# Likewise, in about six minutes on an H200.
bench-gpu:
	PYTHONPATH=src python3 benchmarks/gpu/run.py --output benchmarks/gpu

# Decode steps of a model of each family beside their floors.
bench-families:
	PYTHONPATH=src python3 benchmarks/gpu/run.py --models families --parts latency --output benchmarks/gpu

# PagedAttention's figures, replayed in an hour or two; DATA is the folder of the traces.
bench-pagedattention: $(VENV)/installed-test
	$(BIN)/python benchmarks/pagedattention/run.py --data $(DATA) --output benchmarks/pagedattention

# Merge copies of regions as in Tangram, planning times, distance to the optimum: about a minute.
bench-tangram: $(VENV)/installed-test
	$(BIN)/python benchmarks/tangram/regions.py --output benchmarks/tangram

# Models in one pool against whole models, on several devices, and against fixed splits, all replayed;
# DATA is the folder of the lengths. About fifteen minutes.
bench-tangram-replay: $(VENV)/installed-test
	$(BIN)/python benchmarks/tangram/models.py --data $(DATA) --output benchmarks/tangram

# Clusters of 1 to 64 workers, replayed, in about an hour; PARTS=rates,failure,mixed,large for some of
# it. DATA is the folder of the lengths.
bench-cluster: $(VENV)/installed-test
	$(BIN)/python benchmarks/cluster/run.py --data $(DATA) --output benchmarks/cluster $(if $(PARTS),--parts $(PARTS))

# What the cluster adds to a request, in about four minutes; and what becomes of requests while parts of it
# are killed, ten rounds in about ten minutes.
bench-cluster-overhead: $(VENV)/installed-test
	$(BIN)/python benchmarks/cluster/overhead.py --output benchmarks/cluster

bench-cluster-faults: $(VENV)/installed-test
	$(BIN)/python -m benchmarks.cluster.faults --output benchmarks/cluster

# AVMP's tables, and what they hide: about two minutes; DATA is the folder of the prompt lengths.
bench-avmp: $(VENV)/installed-test
	$(BIN)/python benchmarks/avmp/run.py --data $(DATA) --output benchmarks/avmp

# Requests of a hybrid model that fit at once, and its retained prefixes, in a few minutes.
bench-hybrid: $(VENV)/installed
	$(BIN)/python benchmarks/hybrid/memory.py --data $(DATA) --output benchmarks/hybrid

# Predicted lengths and contiguous memory (ODMA), replayed and trained on the CPU, in about 25
# minutes; PARTS=pressure,real for some of it. DATA is the folder of the traces.
bench-odma: $(VENV)/installed-test
	PYTHONPATH=src $(BIN)/python benchmarks/odma/run.py --data $(DATA) --output benchmarks/odma $(if $(PARTS),--parts $(PARTS))

# vAttention's tables and figures, in about half an hour on an H200; PARTS=calls,waste for some of
# them, and DATA, the folder of the traces, for the replayed one.
bench-vattention:
	PYTHONPATH=src python3 benchmarks/vattention/run.py --output benchmarks/vattention $(if $(PARTS),--parts $(PARTS)) $(if $(DATA),--data $(DATA))

# Eight models in one pool on a GPU, in about ten minutes on an H200 with 100 GB of host memory.
bench-tangram-gpu:
	PYTHONPATH=src python3 benchmarks/tangram/device.py --data $(DATA) --output benchmarks/tangram

# Placement on the devices of a server, such as DEVICES=cuda:0,cuda:1, over HTTP.
bench-tangram-devices:
	PYTHONPATH=src python3 benchmarks/tangram/placed.py --data $(DATA) --devices $(DEVICES) --output benchmarks/tangram

$(VENV)/created:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/installed: $(VENV)/created pyproject.toml constraints.txt
	@echo 'Installing Aquifer and what it needs into $(VENV): mostly torch, a few minutes, only once.'
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e .
	touch $@

$(VENV)/installed-test: $(VENV)/created pyproject.toml constraints.txt
	@echo 'Installing Aquifer and what its tests need into $(VENV): a few minutes, only once.'
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[test]'
	touch $(VENV)/installed $@

# The clients of examples/, without torch and without Aquifer: litellm wants other versions than
# constraints.txt has, and Transformers would import some of the rest in every test.
$(EXAMPLES)/installed: examples/constraints.txt
	@echo 'Installing the clients of examples/ into $(EXAMPLES): about a minute, only once.'
	$(PYTHON) -m venv --clear $(EXAMPLES)
	$(EXAMPLES)/bin/python $(PIP_INSTALL) --no-deps --no-compile -r examples/constraints.txt
	$(EXAMPLES)/bin/python -m pip check
	touch $@

clean:
	rm -rf $(VENV) $(EXAMPLES) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
