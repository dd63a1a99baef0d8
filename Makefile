# The two commands that matter: `make serve` and `make test`. Both set up what they need.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do command -v $$p && break; done)
ARGS ?=
BIN := .venv/bin
PROTOS := $(wildcard protos/*.proto)

.PHONY: help serve lock image pin-images test test-architectures test-clients test-avx2 test-numa soak soak-chaos soak-gateway soak-models soak-speculation soak-step-cost check protos release-protos screenshots docs docs-walk bench bench-engine bench-router bench-gateway bench-speculation bench-kv bench-lora bench-embeddings dev clean
.DEFAULT_GOAL := help

help:
	@echo 'make serve [ARGS="--port 8000 --workers 2"]   set up, fetch the demo model, serve it'
	@echo 'make test  [ARGS="-k router"]                  set up, run every test'
	@echo 'make test-clients                             of these, only the clients of other makers'
	@echo 'make test-avx2 [ARGS="tests/worker"]           the tests as on a CPU without AVX-512; needs gcc and objdump'
	@echo 'make test-architectures                       small models of every architecture, beside transformers'
	@echo 'make test-numa                                pinning and memory on an emulated machine with two NUMA nodes'
	@echo 'make soak  [ARGS="-k cancels"]                 the tests of survival again and again, for about an hour'
	@echo 'make soak-step-cost                           what a worker learns of its steps, over days of virtual time'
	@echo 'make soak-chaos                               an hour of random faults under random clients'
	@echo 'make soak-models                              ten minutes of three models in memory for two, and kills'
	@echo 'make soak-gateway                             20,000 made-up requests, and long runs of properties'
	@echo 'make soak-speculation [ARGS="-k ngram"]        500 prompts with each proposer, up to 64 at once; hours'
	@echo 'make check                                    types, lint, protos, Dockerfile, compose files, manifests'
	@echo 'make bench                                    compare with peers (see benchmarks/RESULTS.md)'
	@echo 'make bench-engine                             of these, only the engine beside openvino-genai'
	@echo 'make bench-router                             placement and forwarding, beside peers'
	@echo 'make bench-gateway                            CPU per streamed token, idle streams, open connections'
	@echo 'make bench-speculation                        speculative decoding, with and without, and beside a peer'
	@echo 'make bench-kv                                 cached prefixes after a worker died'
	@echo 'make bench-embeddings                         embeddings, beside openvino-genai and sentence-transformers'
	@echo 'make bench-lora                               LoRA adapters in one batch, and more of them than fit into memory'
	@echo 'make protos                                   regenerate protos/*_pb2*'
	@echo 'make lock                                     write requirements.lock, what the image installs'
	@echo 'make image                                    build the image, on a base image held by digest'
	@echo 'make pin-images                               renew the digests of images that are not built here'
	@echo 'make screenshots                              the pictures of console and dashboard, in docs/images'
	@echo 'make docs-walk                                the picture of the walk, in docs/architecture.md'
	@echo 'make docs                                     the documentation site, in .make/site; links are checked'
	@echo 'make dev                                      set up only'

# Setting up writes to standard error: what `make serve` writes to standard output is the ready line.
.venv/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "headrace needs Python 3.11 or newer; say make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "making .venv with $(PYTHON)" >&2
	@$(PYTHON) -m venv .venv >&2

.venv/.serve: .venv/pyvenv.cfg pyproject.toml constraints.txt
	@echo "installing headrace and what it needs into .venv" >&2
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[convert,encryption]' >&2
	@touch $@

.venv/.dev: .venv/pyvenv.cfg pyproject.toml constraints.txt
	@echo "installing headrace and what its development needs into .venv" >&2
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[convert,dev,encryption,otel]' >&2
	@touch $@ .venv/.serve

# Tools that cannot follow an editable install see the packages under their real names through these links.
.links/headrace:
	@mkdir -p .links/protos/headrace
	@ln -sfn .. .links/headrace
	@ln -sfn ../../../protos .links/protos/headrace/protos

serve: .venv/.serve
	@exec $(BIN)/headrace serve $(ARGS)

# One process starts fleets with the real model, the other runs all else. ARGS="-n 0" runs all in one.
test: .venv/.dev .links/headrace .make/clients/.done .make/architectures/.done
	$(BIN)/pytest -n 2 --no-loadscope-reorder $(ARGS)

# A minute of installing, and not all clients agree with our own pins: they get an environment of their own.
.make/clients/.done: tests/e2e/clients/requirements.txt tests/e2e/clients/package.json
	@echo "installing clients of other makers into .make/clients" >&2
	@$(PYTHON) -m venv .make/clients
	@.make/clients/bin/pip install --quiet --disable-pip-version-check --no-deps -r tests/e2e/clients/requirements.txt
	@if command -v npm > /dev/null; then cp tests/e2e/clients/package.json .make/clients/ && \
	    npm install --prefix .make/clients --no-audit --no-fund --silent; else echo "no npm: without the clients for Node" >&2; fi
	@touch $@

# PyTorch and optimum-intel export the small models of tests/architectures, and nothing else needs them.
.make/architectures/.done: tests/architectures/requirements.txt tests/architectures/encoder_requirements.txt
	@echo "installing what exports small models into .make/architectures" >&2
	@$(PYTHON) -m venv .make/architectures
	@.make/architectures/bin/pip install --quiet --disable-pip-version-check --no-deps $(addprefix -r ,$^)
	@touch $@

# Versions of transformers that optimum-intel needs for some architectures, in front of the packages above.
.make/transformers-%/.done: .make/architectures/.done
	@.make/architectures/bin/pip install --quiet --disable-pip-version-check --no-deps --upgrade \
	    --target .make/transformers-$* transformers==$* huggingface_hub==1.21.0
	@touch $@

# All families, and prompts of 2,000 tokens; the models are exported once, which takes minutes.
test-architectures: .venv/.dev .links/headrace .make/transformers-5.2.0/.done .make/transformers-5.5.4/.done
	HEADRACE_ARCHITECTURES=1 $(BIN)/pytest tests/architectures --timeout 3600 $(ARGS)

# The kernel that the emulated machine boots: Debian's for clouds, which needs no module to get to its first process.
.make/numa/vmlinuz:
	@command -v apt-get > /dev/null || { echo "test-numa fetches its kernel with apt-get; elsewhere put one at $@" >&2; exit 1; }
	@echo "fetching a kernel into .make/numa" >&2
	@mkdir -p .make/numa && cd .make/numa && rm -rf boot *.deb && \
	    apt-get download -qq "$$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/.*Depends: \(linux-image-\)/\1/p' | head -1)" && \
	    dpkg-deb --fsys-tarfile linux-image-*.deb | tar -x --wildcards './boot/vmlinuz-*' && mv boot/vmlinuz-* vmlinuz && rm -rf boot *.deb

test-numa: .venv/.dev .links/headrace .make/numa/vmlinuz
	HEADRACE_NUMA_KERNEL=.make/numa/vmlinuz $(BIN)/pytest tests/infra/test_two_nodes.py $(ARGS)

# OpenVINO then chooses the kernels of such a CPU, which are not exact in steps of every size.
test-avx2: .venv/.dev .links/headrace .make/clients/.done .make/architectures/.done
	$(BIN)/python -m tests.infra.lesser_cpu avx2 $(BIN)/pytest -n 2 --no-loadscope-reorder $(ARGS)

test-clients: .venv/.dev .links/headrace .make/clients/.done
	$(BIN)/pytest tests/e2e/test_clients.py $(ARGS)

soak: .venv/.dev .links/headrace
	HEADRACE_SOAK=1 $(BIN)/pytest -s tests/e2e/test_survival.py tests/e2e/test_cancels.py tests/e2e/test_redis.py tests/e2e/test_structured.py \
	    tests/e2e/test_engine_exact.py tests/e2e/test_warm_restart.py tests/worker/kv/test_warm_restart.py $(ARGS)

# HEADRACE_SEED repeats a run's choices.
soak-chaos: .venv/.dev .links/headrace
	HEADRACE_SOAK=1 $(BIN)/pytest -s tests/e2e/test_chaos.py $(ARGS)

# Each answer is compared with that without drafts, bit for bit. ARGS="-k '64 and plain'" runs some of it.
soak-speculation: .venv/.dev .links/headrace
	HEADRACE_SOAK=1 $(BIN)/pytest -n 0 -s tests/e2e/test_speculation_exact.py --timeout 14400 $(ARGS)

# What checks images, compose files and manifests: large, and of no use to tests.
.venv/.check: .venv/.dev
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[check]' >&2
	@touch $@

# A day of virtual time under each of four loads: about an hour of one core.
soak-step-cost: .venv/.dev .links/headrace
	HEADRACE_SOAK=1 $(BIN)/pytest -s tests/sim/test_soak.py --timeout 7200 $(ARGS)

# HEADRACE_SEED repeats a run's choices.
soak-models: .venv/.dev .links/headrace
	HEADRACE_SOAK=1 $(BIN)/pytest -n 0 -s tests/infra/test_model_budget.py $(ARGS)

# About 20,000 requests made up from the OpenAPI document, and long runs of the properties of streams.
soak-gateway: .venv/.dev .links/headrace
	HEADRACE_SOAK=1 $(BIN)/pytest -s tests/gateway/operations/test_schemathesis.py tests/gateway/chat/test_stream_equals_unary.py --timeout 7200 $(ARGS)

check: .venv/.check .links/headrace
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint
	$(BIN)/buf breaking --against protos/released.binpb
	$(BIN)/hadolint Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml deploy/compose/*.yaml
	$(BIN)/pytest --quiet tests/deploy tests/test_docs.py

# For CPython 3.11 on x86-64, the interpreter and machine of the image.
lock: .venv/.dev
	$(BIN)/python deploy/lock.py

# On a base image held by digest.
image:
	docker compose build pull

pin-images:
	@$(PYTHON) deploy/pin_images.py

# What `make check` holds changes of the protos to. Said at a release, when what is then served becomes a promise.
release-protos: .venv/.dev .links/headrace
	$(BIN)/buf build --exclude-source-info -o protos/released.binpb

protos: .venv/.dev
	@rm -rf .make/protos && mkdir -p .make/protos
	$(BIN)/python -m grpc_tools.protoc -Iheadrace/protos=protos --python_out=.make/protos --pyi_out=.make/protos \
	    --grpc_python_out=.make/protos $(addprefix headrace/,$(PROTOS))
	@cp .make/protos/headrace/protos/* protos/

# Needs Chromium and its driver, as the tests of the console do.
screenshots: .venv/.dev .links/headrace
	$(BIN)/python -m tests.screenshots
	$(BIN)/python -m tests.dashboard_picture

# mkdocs advertises its successor unless it is told not to.
docs: .venv/.docs .links/headrace
	$(BIN)/python -m tests.cli_reference
	$(BIN)/python -m tests.field_reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The picture of one chat's way through the gateway, in docs/architecture.md.
docs-walk: .venv/.dev .links/headrace
	HEADRACE_DRAW_WALK=1 $(BIN)/pytest -n 0 -q tests/gateway/test_walk.py

.venv/.docs: .venv/.dev
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]' >&2
	@touch $@

bench: .venv/.dev
	$(BIN)/python -m benchmarks

bench-engine: .venv/.dev
	$(BIN)/python -m benchmarks engine

# Without dependencies: what the peer wants besides is either there or not needed for what is measured.
.venv/.bench: .venv/.dev
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt ai-dynamo-runtime pyzmq
	@touch $@

bench-router: .venv/.bench
	DYN_LOG=error $(BIN)/python -m benchmarks.router.decision
	$(BIN)/python -m benchmarks.router.fleet
	$(BIN)/python -m benchmarks.router.overhead

bench-gateway: .venv/.dev
	$(BIN)/python -m benchmarks.gateway.tokens

# Alternating pairs, with and without, and beside openvino-genai's prompt lookup.
bench-speculation: .venv/.dev .links/headrace
	$(BIN)/python -m benchmarks speculation

# Peers beside the environment that exports models, so that its tests do not see them.
.make/sentence-transformers/.done: .make/architectures/.done benchmarks/models/sentence_transformers.txt
	@.make/architectures/bin/pip install --quiet --disable-pip-version-check --no-deps --target .make/sentence-transformers \
	    --upgrade -r benchmarks/models/sentence_transformers.txt
	@touch $@

bench-embeddings: .venv/.dev .links/headrace .make/sentence-transformers/.done
	$(BIN)/python -m benchmarks.models.embeddings $(ARGS)

bench-kv: .venv/.dev
	$(BIN)/python -m benchmarks.cache.restart $(ARGS)

# Alternating runs of one batch, the base model alone and one adapter at a time; then 1,000 adapters, 16 in memory.
bench-lora: .venv/.dev .links/headrace
	$(BIN)/python -m benchmarks lora

dev: .venv/.dev .links/headrace

clean:
	rm -rf .venv .links .make build dist *.egg-info
