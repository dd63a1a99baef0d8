// The fleet, live: the gateway's last minutes as charts, the workers by host and NUMA node, the routers.

import { ago, Chart, sparkline } from "./charts.js";
import { h, say } from "./dom.js";
import { isStale } from "./rates.js";

const LEAST_SPARK = 20;
const MIN_INTERVALS = 30;
const MAX_EVENTS = 8;
const RANGES = new Map([[2, "5 minutes"], [30, "1 hour"], [300, "24 hours"]]);
const MINUTE_S = 60;
const numbers = new Intl.NumberFormat("en");
const whole = (value) => numbers.format(Math.round(value));
const compact = (value) => (value >= 10000 ? `${whole(value / 1000)}k` : value >= 10 || Number.isInteger(value) ? whole(value) : value.toFixed(1));
const percent = (share) => `${Math.round(share * 100)} %`;
const time = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 10000 ? 1 : 0)} s`);

/** Intervals of the gateway by number; `count` of them are shown. */
export class History {
  constructor() {
    this.byNumber = new Map();
    this.next = 0;
  }

  take(gateway, recent) {
    if (this.instance !== gateway.instance) {
      this.instance = gateway.instance;
      this.byNumber.clear();
    }
    for (const interval of recent.intervals) this.byNumber.set(interval.number, interval);
    this.next = recent.next;
    this.intervalS = recent.interval_s;
    for (const number of this.byNumber.keys()) if (number < this.next - recent.num_intervals) this.byNumber.delete(number);
    // A gateway that has not run for long is shown closer.
    const first = Math.min(...this.byNumber.keys(), this.next);
    this.count = Math.min(recent.num_intervals, Math.max(MIN_INTERVALS, this.next - first));
  }

  /** One value for each interval that is shown, oldest first; `otherwise` where nothing happened. */
  list(value, otherwise) {
    return Array.from({ length: this.count }, (_, i) => {
      const interval = this.byNumber.get(this.next - this.count + i);
      return interval ? value(interval) : otherwise;
    });
  }

  /** Sum of a field over the latest intervals. */
  sum(field, intervals) {
    let total = 0;
    for (let number = this.next - intervals; number < this.next; number += 1) total += this.byNumber.get(number)?.[field] ?? 0;
    return total;
  }
}

/** Where prompt tokens come from, fastest first. */
const TIERS = [["memory", "in memory"], ["disk", "from disk"], ["peers", "from others"], ["computed", "computed"]];

/** The blocks of a worker: held by requests, reusable, and empty. What is held can mostly be found too. */
export function blocksOf(load) {
  const used = load.num_blocks - load.num_free_blocks;
  const reusable = Math.min(load.num_free_blocks, Math.max(0, load.num_cached_blocks - used));
  return { total: load.num_blocks, used, reusable, empty: load.num_free_blocks - reusable };
}

/** Workers grouped by host, then by NUMA node: [[host, [[node, [worker, ...]], ...]], ...], in order. */
export function grouped(workers) {
  const hosts = new Map();
  for (const worker of workers) {
    if (!hosts.has(worker.host)) hosts.set(worker.host, new Map());
    const nodes = hosts.get(worker.host);
    if (!nodes.has(worker.numa_node)) nodes.set(worker.numa_node, []);
    nodes.get(worker.numa_node).push(worker);
  }
  const inOrder = (map) => [...map].sort(([a], [b]) => (a ?? -1) < (b ?? -1) ? -1 : 1);
  return inOrder(hosts).map(([host, nodes]) => [host, inOrder(nodes)]);
}

/** The prompt tokens of a worker since its start: found in memory, read from the disk, fetched from others, and computed. */
export function tiersOf({ prompt_tokens_cached: cached, prompt_tokens_computed: computed, prompt_tokens_from_disk: disk, prompt_tokens_from_peers: peers }) {
  return { memory: Math.max(0, cached - disk - peers), disk, peers, computed };
}

/** Which layers each stage of a pipeline has, and which part of the time of steps it has waited for others or the network; and its ranks. */
export function stagesOf(load) {
  return (load.stages ?? []).flatMap(({ address, first_layer: first, num_layers: count, compute_seconds: computed, wait_seconds: waited, ranks }, stage) => {
    const layers = count === 1 ? `layer ${first}` : `layers ${first} to ${first + count - 1}`;
    const share = computed + waited ? percent(waited / (computed + waited)) : "–";
    const told = `Stage ${stage}: ${layers}${address ? ` on ${address}` : ""}, waited ${share} of its time`;
    return [told, ...ranksOf({ ranks }).map((rank) => `Stage ${stage}, ${rank}`)];
  });
}

/** Where each rank of a divided model runs, and which part of its steps it has waited for slower ones. */
export function ranksOf(load) {
  return (load.ranks ?? []).map(({ numa_node: node, cpus, step_seconds: steps, wait_seconds: waits }, rank) => {
    const place = `CPUs ${cpus}${node === null ? "" : ` on NUMA node ${node}`}`;
    return `Rank ${rank}: ${place}, waited ${steps ? percent(waits / steps) : "–"} of its time`;
  });
}

class WorkerCard {
  constructor(id) {
    this.name = h("h5", null, id);
    this.dot = h("span", { class: "dot" });
    this.state = h("span", { class: "state" });
    this.model = h("span", { class: "of-model" });
    this.detail = h("p", { class: "detail", hidden: true });
    this.used = h("i", { class: "used" });
    this.reusable = h("i", { class: "reusable" });
    this.bar = h("div", { class: "blocks", role: "img" }, this.used, this.reusable);
    this.legend = {};
    const key = (name, label) => h("li", { class: name }, (this.legend[name] = h("b")), ` ${label}`);
    this.tiers = Object.fromEntries(TIERS.map(([name]) => [name, h("i", { class: name })]));
    this.tierBar = h("div", { class: "blocks tiers", role: "img" }, Object.values(this.tiers));
    this.spark = sparkline();
    this.figures = {};
    const figure = (name, label, about) => h("div", { title: about }, h("dt", null, label), (this.figures[name] = h("dd", null, "–")));
    this.body = h(
      "div",
      null,
      h("p", { class: "caption" }, "KV blocks"),
      this.bar,
      h("ul", { class: "block-key" }, key("used", "in use"), key("reusable", "reusable"), key("unused", "free")),
      h("p", { class: "caption" }, "Prompt tokens"),
      this.tierBar,
      h("ul", { class: "block-key" }, TIERS.map(([name, label]) => key(name, label))),
      h(
        "dl",
        { class: "worker-figures" },
        figure("running", "Running", "Requests in the batch"),
        figure("waiting", "Waiting", "Requests that wait for their first step"),
        figure("hits", "Prefix hits", "Share of prompt tokens found in the prefix cache since the worker started"),
        figure("prefill", "Prefill", "Learned rate of prompt processing, in tokens per second"),
        figure("step", "Decode step", "Learned time of a step at the present batch"),
        h("div", { class: "with-spark", title: "Tokens generated per second in the last minute" }, h("dt", null, "Tokens/s"), (this.figures.rate = h("dd", null, "–")), this.spark.element),
      ),
    );
    this.parts = h("ul", { class: "block-key", hidden: true });
    this.body.append(this.parts);
    this.element = h("article", { class: "worker", "aria-label": `Worker ${id}` }, h("header", null, this.dot, this.name, this.state, this.model), this.detail, this.body);
  }

  update(worker, rate) {
    const { load, state } = worker;
    this.dot.dataset.state = state;
    this.element.dataset.state = state;
    say(this.state, isStale(worker) ? `${state}, last heard ${ago(worker.report_age_ms / 1000)}` : state);
    say(this.model, worker.role === "both" ? worker.model : `${worker.model}, ${worker.role}`);
    say(this.detail, worker.detail);
    this.detail.hidden = !worker.detail;
    this.body.hidden = !load;
    this.#drawRate(rate);
    if (!load) return;
    const { total, used, reusable, empty } = blocksOf(load);
    this.used.style.width = `${(used / total) * 100}%`;
    this.reusable.style.width = `${(reusable / total) * 100}%`;
    say(this.legend.used, whole(used));
    say(this.legend.reusable, whole(reusable));
    say(this.legend.unused, whole(empty));
    this.bar.setAttribute("aria-label", `KV blocks: ${used} in use, ${reusable} reusable, ${empty} free, of ${total}`);
    this.#drawTiers(tiersOf(load.counters));
    const stages = stagesOf(load);
    const parts = stages.length ? stages : ranksOf(load);
    this.parts.hidden = !parts.length;
    this.parts.replaceChildren(...parts.map((text) => h("li", null, text)));
    const { prompt_tokens_cached: cached, prompt_tokens_computed: computed } = load.counters;
    say(this.figures.running, `${load.num_running} of ${load.max_num_seqs}`);
    say(this.figures.waiting, String(load.num_waiting));
    say(this.figures.hits, cached + computed ? percent(cached / (cached + computed)) : "–");
    say(this.figures.prefill, load.prefill_tokens_per_s ? `${compact(load.prefill_tokens_per_s)} /s` : "–");
    say(this.figures.step, load.decode_step_ms ? `${load.decode_step_ms.toFixed(load.decode_step_ms < 10 ? 1 : 0)} ms` : "–");
  }

  #drawTiers(tiers) {
    const all = Object.values(tiers).reduce((a, b) => a + b, 0);
    for (const [name] of TIERS) {
      this.tiers[name].style.width = `${all ? (tiers[name] / all) * 100 : 0}%`;
      say(this.legend[name], compact(tiers[name]));
    }
    this.tierBar.setAttribute("aria-label", `Prompt tokens: ${TIERS.map(([name, label]) => `${tiers[name]} ${label}`).join(", ")}`);
  }

  #drawRate({ now, latest }) {
    this.spark.update([...Array(Math.max(0, LEAST_SPARK - latest.length)).fill(null), ...latest]);
    say(this.figures.rate, now === null ? "–" : compact(now < 1 ? Math.round(now) : now));
  }
}

/** The workers of each model, by its name: [[name, workers], ...], in order. */
export function byModel(workers) {
  const found = new Map();
  for (const worker of workers.filter(({ model }) => model)) found.set(worker.model, [...(found.get(worker.model) ?? []), worker]);
  return [...found].sort(([a], [b]) => (a < b ? -1 : 1));
}

export class Fleet {
  /** `rates` are those of the workers; `changed` is called when something else is to be asked for. */
  constructor(root, rates, changed) {
    this.rates = rates;
    this.changed = changed;
    this.history = new History();
    this.lengthS = 2;
    this.model = "";
    this.cards = new Map();
    this.states = undefined;
    this.events = [];
    this.charts = charts();
    this.problem = h("p", { class: "notice bad", role: "alert", hidden: true });
    this.about = h("p");
    this.range = h("select", { id: "range" }, [...RANGES].map(([seconds, name]) => h("option", { value: seconds }, name)));
    this.models = h("select", { id: "of-model" }, h("option", { value: "" }, "all models"));
    this.table = h("tbody");
    this.summary = h("p", { class: "summary" });
    this.workers = h("div", { class: "hosts" });
    this.routers = h("ul", { class: "routers" });
    this.eventList = h("ol", { class: "events", "aria-live": "polite" });
    this.range.addEventListener("change", () => this.#ask(Number(this.range.value), this.model));
    this.models.addEventListener("change", () => this.#ask(this.lengthS, this.models.value));
    const heads = ["Model", "Ready", "Running", "Waiting", "Tokens/s", "Prefix hits", "KV in use"];
    root.replaceChildren(
      h(
        "div",
        { class: "fleet-page" },
        h("h1", { class: "visually-hidden" }, "Fleet"),
        this.problem,
        h(
          "section",
          null,
          h(
            "div",
            { class: "section-head" },
            h("h2", null, "Through this gateway"),
            this.about,
            h("div", { class: "choices" }, h("label", null, "Time ", this.range), h("label", null, "Model ", this.models)),
          ),
          h("div", { class: "charts" }, Object.values(this.charts).map((chart) => chart.element)),
        ),
        h(
          "section",
          null,
          h("div", { class: "section-head" }, h("h2", null, "Models")),
          h("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Models" }, h("table", { class: "models" }, h("thead", null, h("tr", null, heads.map((head) => h("th", { scope: "col" }, head)))), this.table)),
        ),
        h("section", null, h("div", { class: "section-head" }, h("h2", null, "Workers"), this.summary), this.workers),
        h(
          "div",
          { class: "pair" },
          h("section", null, h("div", { class: "section-head" }, h("h2", null, "Routers")), this.routers),
          h("section", null, h("div", { class: "section-head" }, h("h2", null, "Changes"), h("p", null, "since this view was opened")), this.eventList),
        ),
      ),
    );
    this.#listEvents();
  }

  /** What is to be asked of the gateway. */
  get asked() {
    return { since: this.history.next, lengthS: this.lengthS, model: this.model };
  }

  #ask(lengthS, model) {
    Object.assign(this, { lengthS, model, history: new History() });
    this.models.value = model;
    this.charts.requests.element.hidden = Boolean(model); // a request that is refused has no model
    if (this.seen) this.#updateWorkers(this.seen);
    this.changed();
  }

  /** Show an answer of /console/fleet to what was asked. */
  update(answer, { lengthS, model }) {
    this.problem.hidden = !answer.problem;
    say(this.problem, answer.problem && `The router cannot be asked: ${answer.problem}`);
    say(this.about, `headrace ${answer.gateway.version} on ${answer.gateway.host}`);
    if (lengthS === this.lengthS && model === this.model) {
      this.history.take(answer.gateway, answer.recent);
      updateCharts(this.charts, this.history, answer.recent.ttft_ms);
    }
    this.#offer(answer);
    this.#updateWorkers(answer.workers);
    this.#updateRouters(answer.routers);
    this.#note(answer.workers);
  }

  /** Offer the models that are known. */
  #offer({ models, workers }) {
    const names = [...new Set([...models.map(({ id }) => id), ...byModel(workers).map(([name]) => name), this.model])].filter(Boolean).sort();
    const shape = names.join("\n");
    if (shape === this.offered) return;
    this.offered = shape;
    this.models.replaceChildren(h("option", { value: "" }, "all models"), ...names.map((name) => h("option", { value: name }, name)));
    this.models.value = this.model;
  }

  /** Say that the gateway itself does not answer. */
  fail(message) {
    this.problem.hidden = false;
    say(this.problem, message);
  }

  #updateWorkers(all) {
    this.seen = all;
    const ids = new Set(all.map((worker) => worker.worker_id));
    for (const id of this.cards.keys()) if (!ids.has(id)) this.cards.delete(id);
    for (const worker of all) {
      if (!this.cards.has(worker.worker_id)) this.cards.set(worker.worker_id, new WorkerCard(worker.worker_id));
      this.cards.get(worker.worker_id).update(worker, this.rates.of(worker.worker_id));
    }
    this.#listModels(all);
    // An adapter is a model without workers of its own.
    const own = all.filter(({ model }) => model === this.model);
    const workers = own.length ? own : all;
    const shape = JSON.stringify(workers.map(({ worker_id, host, numa_node }) => [worker_id, host, numa_node]));
    if (shape !== this.shape) {
      this.shape = shape;
      this.#arrange(workers);
    }
    const { rate, ready, count } = this.rates.pulse(workers);
    const running = workers.reduce((sum, worker) => sum + (worker.load?.num_running ?? 0), 0);
    const waiting = workers.reduce((sum, worker) => sum + (worker.load?.num_waiting ?? 0), 0);
    say(this.summary, count ? `${ready} of ${count} ready, ${running} running, ${waiting} waiting, ${compact(Math.round(rate))} tokens/s` : "");
  }

  #listModels(workers) {
    const rows = byModel(workers).map(([name, members]) => {
      const loads = members.map(({ load }) => load).filter(Boolean);
      const sum = (value) => loads.reduce((total, load) => total + value(load), 0);
      const { rate, ready, count } = this.rates.pulse(members);
      const cached = sum(({ counters }) => counters.prompt_tokens_cached);
      const prompt = cached + sum(({ counters }) => counters.prompt_tokens_computed);
      const blocks = sum(({ num_blocks: blocks }) => blocks);
      const used = sum(({ num_blocks: blocks, num_free_blocks: free }) => blocks - free);
      const share = (part, of) => (of ? percent(part / of) : "–");
      return [name, `${ready} of ${count}`, whole(sum((load) => load.num_running)), whole(sum((load) => load.num_waiting)), compact(Math.round(rate)), share(cached, prompt), share(used, blocks)];
    });
    const names = rows.map(([name]) => name).join("\n");
    if (names !== this.listed) {
      this.listed = names;
      this.table.replaceChildren(
        ...rows.map(([name]) =>
          h("tr", null, h("th", { scope: "row" }, h("button", { type: "button", class: "link", title: "Show this model only", onclick: () => this.#ask(this.lengthS, name === this.model ? "" : name) }, name)), Array.from({ length: 6 }, () => h("td"))),
        ),
      );
    }
    rows.forEach(([name, ...cells], i) => {
      const row = this.table.children[i];
      row.querySelector("button").setAttribute("aria-pressed", String(name === this.model));
      cells.forEach((cell, j) => say(row.children[j + 1], cell));
    });
  }

  #arrange(workers) {
    if (!workers.length) {
      this.workers.replaceChildren(h("p", { class: "empty" }, "No worker is known. A worker that starts registers with the router and appears here."));
      return;
    }
    this.workers.replaceChildren(
      ...grouped(workers).map(([host, nodes]) =>
        h(
          "section",
          { class: "host", "aria-label": `Host ${host}` },
          h("h3", null, host),
          nodes.map(([node, members]) => h("div", { class: "node" }, h("h4", null, node === null ? "not bound to a NUMA node" : `NUMA node ${node}`), h("div", { class: "cards" }, members.map((worker) => this.cards.get(worker.worker_id).element)))),
        ),
      ),
    );
  }

  #updateRouters(routers) {
    const shape = JSON.stringify(routers);
    if (shape === this.routerShape) return;
    this.routerShape = shape;
    this.routers.replaceChildren(
      ...routers.map((router) =>
        h("li", null, h("span", { class: "dot", "data-state": router.connected ? "ready" : "unreachable" }), h("span", { class: "address" }, router.address.replace(/^unix:.*\//, "unix:")), h("span", { class: "state" }, router.connected ? "connected" : "not connected")),
      ),
    );
  }

  /** Enter what changed since the answer before into the list of changes. */
  #note(workers) {
    const states = new Map(workers.map((worker) => [worker.worker_id, worker.state]));
    if (this.states) {
      for (const [id, state] of states) {
        const before = this.states.get(id);
        if (before === undefined) this.#event(state, `${id} appeared, ${state}`);
        else if (before !== state) this.#event(state, `${id} is ${state}`);
      }
      for (const id of this.states.keys()) if (!states.has(id)) this.#event("gone", `${id} is gone`);
    }
    this.states = states;
  }

  #event(state, text) {
    this.events = [{ state, text, at: new Date() }, ...this.events].slice(0, MAX_EVENTS);
    this.#listEvents();
  }

  #listEvents() {
    const none = h("li", { class: "empty" }, "Nothing changed.");
    const made = this.events.map(({ state, text, at }) => h("li", null, h("time", { datetime: at.toISOString() }, at.toLocaleTimeString("en-GB")), h("span", { class: "dot", "data-state": state }), h("span", null, text)));
    this.eventList.replaceChildren(...(made.length ? made : [none]));
  }
}

// Reasons of requests that were refused or failed, for people.
const REASONS = {
  queue_full: "for want of room",
  quota: "by a limit",
  invalid_field: "for a bad value",
  context_too_long: "too long",
  no_capacity: "without a worker",
  worker_lost: "with lost workers",
  deadline: "over time",
  draining: "while stopping",
  internal: "by an error inside",
};

function charts() {
  return {
    tokens: new Chart({ title: "Tokens per second", about: "Tokens that this gateway delivered", kind: "area", series: [{ name: "tokens/s", tone: "tone-a" }], format: compact }),
    ttft: new Chart({ title: "Time to first token", about: "From the arrival of a request to its first token: median and p95 of the last minute, or of the longer time that is shown", kind: "lines", series: [{ name: "p95", tone: "tone-b" }, { name: "median", tone: "tone-a" }], format: time }),
    requests: new Chart({
      title: "Requests",
      about: "Requests that ended, by outcome, of all models",
      kind: "bars",
      series: [{ name: "answered", tone: "tone-a" }, { name: "cancelled", tone: "tone-c" }, { name: "refused", tone: "tone-w" }, { name: "failed", tone: "tone-x" }],
      format: compact,
    }),
    cache: new Chart({ title: "Prefix hits", about: "Share of prompt tokens that were found in a prefix cache: of the last minute, or of the longer time that is shown", kind: "area", series: [{ name: "share", tone: "tone-a" }], format: percent, ceiling: 1 }),
  };
}

function updateCharts(all, history, ttft) {
  const seconds = history.intervalS;
  const isShort = seconds < MINUTE_S / 3;
  // What is told of now is of the last minute, or of all that is shown.
  const told = isShort ? MINUTE_S / seconds : history.count;
  const none = [[null, isShort ? "none in a minute" : "none in this time"]];
  const tokens = history.list((one) => one.tokens / seconds, 0);
  const latest = tokens.slice(isShort ? -3 : 0);
  const rate = latest.reduce((a, b) => a + b, 0) / Math.max(1, latest.length);
  const peak = `peak ${compact(Math.round(Math.max(0, ...tokens)))}`;
  all.tokens.update([tokens], compact(rate < 1 ? Math.round(rate) : rate), [[null, isShort ? peak : `on average, ${peak}`]], seconds);
  const median = history.list((one) => one.ttft_p50_ms, null);
  const p95 = history.list((one) => one.ttft_p95_ms, null);
  const times = ttft.count ? [time(ttft.p50), [["tone-b", `p95 ${time(ttft.p95)}`]]] : ["–", none];
  all.ttft.update([p95, median], ...times, seconds);
  const outcomes = ["answered", "cancelled", "refused", "failed"];
  const sums = outcomes.map((name) => history.sum(name, told));
  const why = (name) => {
    const counts = new Map();
    for (const one of history.list((interval) => interval.reasons?.[name] ?? {}, {}).slice(-told)) {
      for (const [reason, count] of Object.entries(one)) counts.set(reason, (counts.get(reason) ?? 0) + count);
    }
    const reasons = [...counts].sort((a, b) => b[1] - a[1]).map(([reason, count]) => `${count} ${REASONS[reason] ?? reason.replaceAll("_", " ")}`);
    return reasons.length ? ` (${reasons.join(", ")})` : "";
  };
  const others = all.requests.series.flatMap(({ name, tone }, i) => (i && sums[i] ? [[tone, `${sums[i]} ${name}${why(name)}`]] : []));
  const inAll = [[null, isShort ? "in the last minute" : "in this time"]];
  all.requests.update(outcomes.map((name) => history.list((one) => one[name], 0)), whole(sums[0]), others.length ? others : inAll, seconds);
  const share = (cached, prompt) => (prompt ? cached / prompt : null);
  const now = share(history.sum("cached_tokens", told), history.sum("prompt_tokens", told));
  all.cache.update([history.list((one) => share(one.cached_tokens, one.prompt_tokens), null)], now === null ? "–" : percent(now), now === null ? none : [[null, "of prompt tokens"]], seconds);
}
