// What the engines do now: rates and shares from the metrics, and the last requests on a line of time.

import { readMetrics, request } from "./api.js";
import { useLooks } from "./models.js";
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
  const [asked, setAsked] = useState({ now: 0, requests: [] });
  const [problem, setProblem] = useState("");
  useLooks(async () => {
    try {
      const metrics = readMetrics(await (await request("metrics")).text());
      looks.current = [...looks.current, look(metrics, performance.now())].slice(-KEPT);
      setNow(looks.current.at(-1));
      setAsked(await (await request("requests")).json());
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
      <p>${now.prompts ? ((100 * now.cached) / now.prompts).toFixed(1) : "0.0"} % of ${now.prompts.toLocaleString()} prompt tokens came from the cache${now.preempted ? `; ${now.preempted} preemptions` : ""}.</p>
      ${Object.keys(now.reasons).length ? html`<p>Prompts that were not all found in it, by reason:</p>` : null}
      ${Object.keys(now.reasons).length ? html`<table><tbody>${Object.entries(now.reasons).map(([reason, count]) => html`<tr><th scope="row">${reason.replaceAll("_", " ")}</th><td>${count}</td></tr>`)}</tbody></table>` : null}
      <h3>The last requests</h3>
      <${Timeline} ...${asked} />
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

const SHOWN = 20;
const seconds = (value, digits = 2) => (value === undefined ? "–" : `${value.toFixed(digits)} s`);

// Requests as the server tells them: times in seconds, `began` since the epoch; one that runs has no `seconds`.
function Timeline({ now, requests }) {
  const shown = requests.slice(-SHOWN);
  if (!shown.length) return html`<p>None yet: ask something.</p>`;
  const begin = Math.min(...shown.map(({ began }) => began));
  const end = Math.max(...shown.map((one) => (one.seconds === undefined ? now : one.began + one.seconds)));
  const x = (time) => (1000 * (time - begin)) / Math.max(1e-3, end - begin);
  const bar = (from, to, kind) => html`<rect x=${x(from)} width=${Math.max(1, x(to) - x(from))} height="16" class=${kind} />`;
  return html`
    <table class="timeline">
      <thead><tr>${["Model", "Prompt", "Cached", "Written", "Queued", "First token", "A token", "In all", "End", "Time"].map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
      <tbody>${shown.map((one) => {
        const until = one.seconds === undefined ? now : one.began + one.seconds;
        const first = one.began + (one.time_to_first_token_seconds ?? until - one.began);
        const admitted = Math.min(first, one.began + (one.queue_seconds ?? 0));
        const each = one.time_per_output_token_seconds;
        return html`
          <tr key=${`${one.began} ${one.request_id}`}>
            <th scope="row" title=${`${one.method} ${one.route}, ${one.request_id}`}>${one.model ?? one.route}</th>
            <td>${one.prompt_tokens ?? "–"}</td>
            <td>${one.cached_tokens ?? "–"}</td>
            <td>${one.output_tokens ?? "–"}</td>
            <td>${seconds(one.queue_seconds, 3)}</td>
            <td>${seconds(one.time_to_first_token_seconds, 3)}</td>
            <td>${each === undefined ? "–" : `${(1000 * each).toFixed(1)} ms`}</td>
            <td>${seconds(one.seconds)}</td>
            <td>${outcome(one)}</td>
            <td><svg viewBox="0 0 1000 16" preserveAspectRatio="none" aria-hidden="true">
              ${bar(one.began, admitted, "queued")}${bar(admitted, first, "before")}${bar(first, until, "writing")}
            </svg></td>
          </tr>`;
      })}</tbody>
    </table>
    <p class="hint">The bars: queued, computing the prompt, writing.</p>`;
}

function outcome(one) {
  if (one.seconds === undefined) return "running";
  if (one.error) return `${one.status} ${one.error}`;
  return Object.keys(one.finish_reasons ?? {}).join(", ") || one.status;
}
