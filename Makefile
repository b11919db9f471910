# What a clean machine with Python 3.11, gcc, make and git needs to build, check and show keepstep.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := check

PYTHON ?= python3
PY := .venv/bin/python
TF := .venv-tf/bin/python
TORCH := .venv-torch/bin/python
TOOLKIT := .venv-toolkit/bin/python
LOCALSTACK := .venv-localstack/bin/python
JOBS ?= 2
export PYTHONPATH := runtime
export PYTHONDONTWRITEBYTECODE :=

DEV_STAMP := .venv/.stamp-$(shell cat requirements/dev.txt | sha256sum | cut -c1-16)
TF_STAMP := .venv-tf/.stamp-$(shell cat requirements/tensorflow.txt requirements/tf-keras.txt requirements/mpi4py.txt | sha256sum | cut -c1-16)
TORCH_STAMP := .venv-torch/.stamp-$(shell cat requirements/torch.txt | sha256sum | cut -c1-16)
TOOLKIT_STAMP := .venv-toolkit/.stamp-$(shell cat requirements/toolkit*.txt | sha256sum | cut -c1-16)
SDK_STAMP := .venv-sdk/.stamp-$(shell cat requirements/sdk.txt | sha256sum | cut -c1-16)
SDK2_STAMP := .venv-sdk2/.stamp-$(shell cat requirements/sdk2.txt | sha256sum | cut -c1-16)
LOCALSTACK_STAMP := .venv-localstack/.stamp-$(shell cat requirements/localstack.txt | sha256sum | cut -c1-16)
NATIVE := $(if $(filter x86_64,$(shell uname -m)),runtime/keepstep_worker/native/stream-x86_64.so)
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --require-hashes

.PHONY: venv venv-tf venv-torch venv-toolkit venv-localstack venv-sdk docker etcd mpi nets lint check test test-hosts test-more test-resume test-containers test-matrix torture torture-files outage wheels demo bench-fold bench-overhead bench-rendezvous bench-snapshot bench-upload bench-restore bench-recovery bench-goodput bench-startup bench-straggler attribution no-false-alarm soak campaign campaign-health requirements clean

venv: $(DEV_STAMP)
$(DEV_STAMP):
	$(PYTHON) -m venv .venv
	$(PY) $(PIP_INSTALL) -r requirements/dev.txt
	rm -f .venv/.stamp-*
	touch $@

venv-tf: $(TF_STAMP) $(NATIVE)
$(TF_STAMP):
	$(PYTHON) -m venv .venv-tf
	$(TF) $(PIP_INSTALL) -r requirements/tensorflow.txt
	$(TF) $(PIP_INSTALL) --no-deps -r requirements/tf-keras.txt
	$(TF) $(PIP_INSTALL) -r requirements/mpi4py.txt
	rm -f .venv-tf/.stamp-*
	touch $@

# The copy of snapshots, for the one kind of processor that there is code for; wheels compile their own.
runtime/keepstep_worker/native/stream-x86_64.so: runtime/keepstep_worker/native/stream.c runtime/keepstep_worker/native/compile.sh
	runtime/keepstep_worker/native/compile.sh $@

# Older releases of TensorFlow, each in an environment of its own: .venv-tf-2.13 and so on.
.venv-tf-%/.stamp: requirements/tensorflow-%.txt
	$(PYTHON) -m venv .venv-tf-$*
	.venv-tf-$*/bin/python $(PIP_INSTALL) -r $<
	touch $@

# The CPU build of torch is on an index of its own; requirements/torch.in says how to name it, or a folder with the wheel.
venv-torch: $(TORCH_STAMP)
$(TORCH_STAMP):
	$(PYTHON) -m venv .venv-torch
	$(TORCH) $(PIP_INSTALL) -r requirements/torch.txt
	rm -f .venv-torch/.stamp-*
	touch $@

# AWS's own toolkit; it comes as source, and a compiler is wanted for it.
venv-toolkit: $(TOOLKIT_STAMP)
$(TOOLKIT_STAMP):
	$(PYTHON) -m venv .venv-toolkit
	$(TOOLKIT) $(PIP_INSTALL) -r requirements/toolkit-build.txt
	$(TOOLKIT) $(PIP_INSTALL) --no-build-isolation -r requirements/toolkit.txt
	$(TOOLKIT) $(PIP_INSTALL) --no-build-isolation --no-deps -r requirements/toolkit-tensorflow.txt
	rm -f .venv-toolkit/.stamp-*
	touch $@

# An S3 server that minds conditions and checksums, for the tests in which those matter.
venv-localstack: $(LOCALSTACK_STAMP)
$(LOCALSTACK_STAMP):
	$(PYTHON) -m venv .venv-localstack
	$(LOCALSTACK) $(PIP_INSTALL) -r requirements/localstack.txt
	rm -f .venv-localstack/.stamp-*
	touch $@

# The SageMaker SDK in its two versions, for the tests that have it run jobs in containers.
venv-sdk: $(SDK_STAMP) $(SDK2_STAMP)
$(SDK_STAMP):
	$(PYTHON) -m venv .venv-sdk
	.venv-sdk/bin/python $(PIP_INSTALL) -r requirements/sdk.txt
	rm -f .venv-sdk/.stamp-*
	touch $@
$(SDK2_STAMP):
	$(PYTHON) -m venv .venv-sdk2
	.venv-sdk2/bin/python $(PIP_INSTALL) -r requirements/sdk2.txt
	rm -f .venv-sdk2/.stamp-*
	touch $@

# Debian's Docker Engine, and what makes an image of Debian itself; the tests start an engine of their own.
docker:
	@if [ -x /usr/sbin/dockerd ] && [ -x /usr/bin/docker ] && [ -x /usr/sbin/debootstrap ] && [ -x /usr/bin/docker-compose ]; then exit 0; fi; \
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	  docker.io docker-compose debootstrap >/dev/null

# Multi-host jobs, and `demo` with them, agree through etcd (3.4 or later).
etcd:
	@if command -v etcd >/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends etcd-server >/dev/null; \
	  command -v etcd >/dev/null; \
	else \
	  echo "etcd 3.4 or later is not on PATH. Install it: 'sudo apt-get install etcd-server' on Debian 12 or Ubuntu 24.04," \
	       "'brew install etcd' with Homebrew, or put the etcd binary on PATH." >&2; exit 1; \
	fi

# Tests have Open MPI's mpirun start ranks; without it they are left out and say so.
mpi:
	@if command -v mpirun >/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends openmpi-bin >/dev/null; \
	else \
	  echo "mpirun is not on PATH: tests with ranks that it starts are left out"; \
	fi

# Tests give hosts networks of their own; without the right to do so, or without these, they are left out and say so.
nets:
	@if command -v ip >/dev/null && command -v iptables >/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends iproute2 iptables >/dev/null; \
	else \
	  echo "ip and iptables are not on PATH: tests with networks of their own are left out"; \
	fi

lint: venv
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-cache

check: venv lint
	$(PY) -m pytest tests/simulation tests/house tests/unit tests/scenarios -n $(JOBS) --dist worksteal

test: check venv-tf venv-toolkit etcd nets
	$(PY) -m pytest tests/differential -n $(JOBS) --dist loadfile
	$(PY) -m pytest tests/conformance tests/integration -m "not localstack" -n $(JOBS) --dist worksteal
	$(PY) -m pytest tests/e2e -m "not hosts and not more" -n $(JOBS) --dist worksteal
	$(MAKE) wheels

# Many hosts and their networks, with a stand-in for the training, and a minute of the soak; the stores' suite on an S3 that
# minds conditions and checksums, and a few kills of the torture.
test-hosts: venv venv-tf venv-localstack etcd nets
	$(PY) -m pytest tests/conformance -m localstack -n $(JOBS)
	$(PY) -m pytest tests/e2e -m hosts -n $(JOBS) --dist load

# What `make test` has no room for: parameter servers, ranks that mpirun starts, spares, stragglers. Of some, as of some that
# `make test` has, a sample, by KEEPSTEP_TEST_SEED; KEEPSTEP_TEST_ALL=1 has all.
test-more: venv venv-tf etcd mpi
	$(PY) -m pytest tests/e2e -m more -n $(JOBS) --dist worksteal

# Every form of `fit` with Keras 3 and tf_keras, killed, drained and resumed, every fault in each script, samples from each kind
# of source, and every moment of an interruption and every harm to a peer in it: the other targets have samples of these, by
# KEEPSTEP_TEST_SEED.
test-resume: venv venv-tf etcd nets
	KEEPSTEP_TEST_ALL=1 $(PY) -m pytest tests/e2e/test_fit_resume.py tests/e2e/test_interruption.py tests/e2e/test_faults.py \
	  tests/e2e/test_sources.py tests/e2e/test_interrupted_peers.py -n $(JOBS) --dist worksteal

# The real image, built on Debian's own packages, in jobs of two containers: as the platform starts and stops them, and by
# the SageMaker SDK's local mode; and what docker/compose.yaml plays (KEEPSTEP_TEST_ALL=1: all of that). Needs root.
test-containers: venv venv-sdk docker
	$(PY) -m pytest tests/containers

# Two hosts and a worker that is killed, in a custom loop and in `fit`, with the older releases of TensorFlow that keepstep is
# for (`make test` has the newest); OLDER=2.13 takes one of them.
OLDER ?= 2.13 2.16 2.19
test-matrix: venv etcd $(OLDER:%=.venv-tf-%/.stamp)
	for release in $(OLDER); do \
	  KEEPSTEP_TEST_ALL=1 KEEPSTEP_TF_PYTHON=$(CURDIR)/.venv-tf-$$release/bin/python $(PY) -m pytest \
	    "tests/e2e/test_faults.py::test_a_death_costs_steps_and_no_bit[loop.py-worker 1]" \
	    "tests/e2e/test_faults.py::test_a_death_costs_steps_and_no_bit[fit.py-worker 1]" \
	    tests/e2e/test_held_values.py::test_a_value_that_is_held_stays_as_it_was_however_its_variable_changes; \
	done

# Scripts that write their own checkpoints, killed 100 times at random; `make test` has a sample of it.
torture-files: venv venv-tf
	KEEPSTEP_TEST_ALL=1 $(PY) -m pytest tests/e2e/test_own_files.py -n $(JOBS) --dist worksteal

# Whoever is killed at whatever moment, with an S3 that fails at times: 500 kills with a stand-in for the training, half an
# hour (KILLS=50 makes it short); 90 of TensorFlow, which must end with the bits of a quiet run; and a hundred races for HEAD.
KILLS ?= 500
torture: venv venv-tf venv-localstack etcd
	$(PY) -m benchmarks.torture --kills $(KILLS)
	KEEPSTEP_TEST_ALL=1 $(PY) -m pytest tests/e2e/test_random_kills.py tests/conformance/test_commits.py

# A store that is away for two minutes, and comes back; `make test` has a moment of it.
outage: venv etcd
	KEEPSTEP_TEST_ALL=1 $(PY) -m pytest tests/integration/test_training_goes_on.py -k missed

# Builds both distributions and tries them in a clean environment, where there is no source tree to fall back on.
wheels: venv
	$(PY) tests/wheel/try_wheels.py build/wheels

# Two hosts on this machine, one of them killed in the middle of the training.
STEP ?= 120
demo: venv venv-tf etcd
	rm -rf build/demo
	TF_CPP_MIN_LOG_LEVEL=2 $(PY) -m keepstep local --hosts 2 --python $(TF) --fault kill:1@$(STEP) --out build/demo examples/digits_keras.py

# What keepstep costs; about six minutes on a machine that does nothing else. See benchmarks/README.md.
bench-overhead: venv venv-tf etcd
	$(PY) benchmarks/overhead.py --python $(TF)

# How long a snapshot keeps the training waiting, beside tf.train.Checkpoint; wants 24 GB of memory.
bench-snapshot: venv venv-tf
	$(PY) benchmarks/snapshot.py --python $(TF)

# How long a sealed snapshot takes to be committed to S3, beside boto3 and awscrt; five minutes, one core each.
bench-upload: venv
	$(PY) benchmarks/upload.py

# How long it takes to have a state back: from an own slab, another host's, the store; ten minutes.
bench-restore: venv venv-tf
	$(PY) -m benchmarks.restore --python $(TF)

# What one event costs a node, in jobs of 8, 64 and 512 hosts.
bench-fold: venv
	$(PY) benchmarks/fold.py

# How soon training goes on after a kill, beside torchrun and a loop around a plain script; about 20 minutes.
# BYTES=1000000000 SYSTEMS=standby: of a state of 1 GB, by keepstep alone.
BYTES ?= 100000000
SYSTEMS ?= standby cold torchrun plain
bench-recovery: venv venv-tf venv-torch etcd
	$(PY) -m benchmarks.recovery --python $(TF) --torch $(TORCH) --bytes $(BYTES) --systems $(SYSTEMS)

# What a fault costs in a training that is hurt every 20 s for ten minutes, beside torchrun and a plain loop; half an hour.
bench-goodput: venv venv-tf venv-torch etcd
	$(PY) -m benchmarks.goodput --python $(TF) --torch $(TORCH)

# Two hundred random faults on three hosts, and what is said of each; about 20 minutes.
FAULTS ?= 200
attribution: venv venv-tf etcd
	$(PY) -m benchmarks.attribution --python $(TF) --faults $(FAULTS)

# Slow steps, long evaluations and checkpoints for twenty real minutes, and 200 checkpoints of BatchNorm and metrics:
# neither a hang nor a replica that differs.
no-false-alarm: venv venv-tf etcd
	KEEPSTEP_TEST_ALL=1 $(PY) -m pytest tests/e2e/test_no_false_alarm.py -n $(JOBS)

# Who is slow, and of what: 20 runs each of a slow processor, slow data, and a busy neighbour; and how much a rebalance gains.
# Half an hour; wants both cores for itself.
bench-straggler: venv venv-tf etcd
	$(PY) -m benchmarks.straggler --python $(TF)

# How soon a container's script begins, beside AWS's own toolkit.
bench-startup: venv venv-toolkit
	$(PY) -m benchmarks.startup --toolkit $(TOOLKIT)

# How soon 2 to 256 hosts start once the last one has come, beside torch's rendezvous; about 15 minutes.
bench-rendezvous: venv venv-torch etcd
	$(PY) -m benchmarks.rendezvous --torch $(TORCH)

# Five hosts that are hurt every five seconds for ten minutes. SECONDS=60 makes it short.
SECONDS ?= 600
soak: venv etcd
	PYTHONPATH=runtime $(PY) benchmarks/soak.py --seconds $(SECONDS)

# Ten thousand simulated jobs of 3 to 100 hosts; about half an hour on two cores. SEEDS=0:500 makes it short.
SEEDS ?= 0:10000
campaign: venv
	$(PY) -m tests.simulation.campaign --seeds $(SEEDS)

# Stragglers and GPU faults among 1,000 simulated hosts, six hours under each preset; about half an hour on two cores.
HOSTS ?= 1000
HOURS ?= 6
campaign-health: venv
	$(PY) -m tests.simulation.campaign_health --hosts $(HOSTS) --hours $(HOURS)

# Pins again what requirements/*.in ask for; needs uv on PATH, or UV=/path/to/uv.
requirements:
	requirements/compile.sh

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find runtime tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
