// What the engines do now: rates and shares from the metrics, and the requests of this page on a line of time.

import { readMetrics, request } from "./api.js";
import { useLooks } from "./models.js";
import { timeline } from "./runs.js";
import { html, useRef, useState } from "./vendor/preact.js";

const LOOK_MS = 1000;
const KEPT = 120; // looks
const PARTS = ["plan", "build", "forward", "sample", "commit"];

function sum(metrics, name, labels = {}) {
  return metrics
    .filter((metric) => metric.name === name && Object.entries(labels).every(([label, value]) => metric.labels[label] === value))
    .reduce((total, { value }) => total + value, 0);
}

function look(metrics, at) {
  const of = (name, labels) => sum(metrics, `penstock_${name}`, labels);
  const models = new Set(metrics.filter(({ name }) => name === "penstock_requests_running").map(({ labels }) => labels.model_name));
  const reasons = {};
  for (const { name, labels, value } of metrics) {
    if (name === "penstock_prefix_cache_misses_total") reasons[labels.reason] = (reasons[labels.reason] ?? 0) + value;
  }
  return {
    at, reasons,
    models: [...models],
    running: of("requests_running"),
    waiting: of("requests_waiting"),
    queue: of("queue_seconds"),
    usage: Math.max(0, ...metrics.filter(({ name }) => name === "penstock_kv_cache_usage_ratio").map(({ value }) => value)),
    generated: of("generation_tokens_total"),
    prompts: of("prompt_tokens_total"),
    cached: of("cached_prompt_tokens_total"),
    preempted: of("preemptions_total"),
    steps: of("engine_steps_total"),
    seconds: Object.fromEntries(PARTS.map((part) => [part, of("engine_seconds_total", { part })])),
  };
}

export function Engine() {
  const looks = useRef([]);
  const [now, setNow] = useState(null);
  const [problem, setProblem] = useState("");
  useLooks(async () => {
    try {
      const metrics = readMetrics(await (await request("metrics")).text());
      looks.current = [...looks.current, look(metrics, performance.now())].slice(-KEPT);
      setNow(looks.current.at(-1));
      setProblem("");
    } catch (error) {
      setProblem(error.message);
    }
  }, LOOK_MS);
  if (!now) return html`<section class="view"><h2>Engine</h2><p role="status">${problem || "Reading the figures…"}</p></section>`;
  const rate = (name) => rates(looks.current, name);
  const before = looks.current.at(-2) ?? now;
  const steps = now.steps - before.steps;
  const spent = PARTS.map((part) => [part, steps ? (1000 * (now.seconds[part] - before.seconds[part])) / steps : 0]);
  const asked = now.prompts;
  return html`
    <section class="view" aria-labelledby="engine-title">
      <h2 id="engine-title">Engine</h2>
      ${problem ? html`<p class="error" role="alert">${problem}</p>` : null}
      <div class="figures">
        <${Figure} name="Tokens written a second" value=${last(rate("generated")).toFixed(0)} points=${rate("generated")} />
        <${Figure} name="Prompt tokens a second" value=${last(rate("prompts")).toFixed(0)} points=${rate("prompts")} />
        <${Figure} name="Requests running" value=${now.running} points=${looks.current.map((one) => one.running)} />
        <${Figure} name="Requests waiting" value=${now.waiting ? `${now.waiting}, ${now.queue.toFixed(1)} s` : 0} points=${looks.current.map((one) => one.waiting)} />
        <${Figure} name="KV cache in use" value=${`${(100 * now.usage).toFixed(1)} %`} points=${looks.current.map((one) => one.usage)} most=${1} />
        <${Figure} name="A step, milliseconds" value=${steps ? spent.reduce((total, [, part]) => total + part, 0).toFixed(1) : "idle"} />
      </div>
      <h3>Parts of a step</h3>
      <table><tbody>${spent.map(([part, milliseconds]) => html`<tr><th scope="row">${part}</th><td>${milliseconds.toFixed(2)} ms</td></tr>`)}</tbody></table>
      <h3>Prefix cache</h3>
      <p>${asked ? ((100 * now.cached) / asked).toFixed(1) : "0.0"} % of ${asked.toLocaleString()} prompt tokens came from the cache${now.preempted ? `; ${now.preempted} preemptions` : ""}.</p>
      ${Object.keys(now.reasons).length ? html`<p>Prompts that were not all found in it, by reason:</p>` : null}
      ${Object.keys(now.reasons).length ? html`<table><tbody>${Object.entries(now.reasons).map(([reason, count]) => html`<tr><th scope="row">${reason.replaceAll("_", " ")}</th><td>${count}</td></tr>`)}</tbody></table>` : null}
      <h3>Requests of this page</h3>
      <${Timeline} />
    </section>`;
}

const last = (values) => values.at(-1) ?? 0;

function rates(looks, name) {
  return looks.slice(1).map((one, at) => {
    const seconds = (one.at - looks[at].at) / 1000;
    return Math.max(0, (one[name] - looks[at][name]) / seconds);
  });
}

function Figure({ name, value, points = [], most }) {
  const top = most ?? Math.max(...points, 1e-9);
  const line = points.map((point, at) => `${(200 * at) / Math.max(1, KEPT - 2)},${40 - (38 * point) / top}`).join(" ");
  return html`
    <div class="figure">
      <span>${name}</span><strong>${value}</strong>
      <svg viewBox="0 0 200 40" preserveAspectRatio="none" aria-hidden="true"><polyline points=${line} /></svg>
    </div>`;
}

function Timeline() {
  const shown = timeline.slice(-20);
  if (!shown.length) return html`<p>None yet: ask something.</p>`;
  const begin = Math.min(...shown.map(({ began }) => began));
  const end = Math.max(...shown.map(({ ended }) => ended ?? performance.now()));
  const x = (time) => (1000 * (time - begin)) / Math.max(1, end - begin);
  return html`
    <table class="timeline">
      <thead><tr><th scope="col">Model</th><th scope="col">First token</th><th scope="col">Tokens</th><th scope="col">End</th><th scope="col">Time</th></tr></thead>
      <tbody>${shown.map((one) => {
        const until = one.ended ?? performance.now();
        const first = one.first ?? until;
        return html`
          <tr>
            <th scope="row">${one.model}</th>
            <td>${one.first === null ? "–" : `${((one.first - one.began) / 1000).toFixed(2)} s`}</td>
            <td>${one.tokens || "–"}</td>
            <td>${one.ended === null ? "running" : one.outcome}</td>
            <td><svg viewBox="0 0 1000 16" preserveAspectRatio="none" aria-hidden="true">
              <rect x=${x(one.began)} width=${Math.max(1, x(first) - x(one.began))} height="16" class="before" />
              <rect x=${x(first)} width=${Math.max(1, x(until) - x(first))} height="16" class="writing" />
            </svg></td>
          </tr>`;
      })}</tbody>
    </table>`;
}
