// Tokens per second of each worker, from what it has counted, between two answers of the gateway.

const WINDOW = 60;
const STALE_MS = 1500;
const SILENT = ["unreachable", "not answering"];

/** Whether a worker has reported, but not lately. */
export function isStale({ load, report_age_ms: ageMs }) {
  return Boolean(load) && ageMs > STALE_MS;
}

export class Rates {
  constructor() {
    this.byId = new Map();
  }

  /** Enter the workers of an answer. */
  take(workers, nowMs = performance.now()) {
    const next = new Map();
    for (const worker of workers) {
      const isHeard = worker.load && !isStale(worker) && !SILENT.includes(worker.state);
      next.set(worker.worker_id, rated(this.byId.get(worker.worker_id), isHeard ? worker.load.counters.tokens_generated : null, nowMs));
    }
    this.byId = next;
  }

  /** The rate of a worker: `now`, null if it is not known, and the `latest` ones, oldest first. */
  of(id) {
    return this.byId.get(id) ?? { now: null, latest: [] };
  }

  /** The rate of several workers together, how many of them take requests, and how many there are. */
  pulse(workers) {
    const rate = workers.reduce((sum, worker) => sum + (this.of(worker.worker_id).now ?? 0), 0);
    return { rate, ready: workers.filter((worker) => worker.state === "ready").length, count: workers.length };
  }
}

function rated(before, total, nowMs) {
  const last = before?.last;
  let now = null;
  if (total !== null && last && total >= last.total) now = ((total - last.total) / (nowMs - last.ms)) * 1000;
  const latest = [...(before?.latest ?? []), now].slice(-WINDOW);
  const lately = latest.slice(-3).filter((one) => one !== null);
  if (now !== null) now = lately.reduce((a, b) => a + b, 0) / lately.length;
  return { now, latest, last: total === null ? undefined : { total, ms: nowMs } };
}
