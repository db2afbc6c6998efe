/**
 * The live panel: what the engine's steps do now. Owns the stream of step summaries, which is open
 * only while the panel is shown and the page is visible.
 *
 * @typedef {import("./app.js").App} App
 * @typedef {import("./live_picture.js").Step} Step
 * @typedef {{rows: number, pages: number, page_size: number, model: string}} Hello
 */
import { ApiFailure, isAbort, request } from "./api.js";
import { KINDS, LivePicture, WINDOW_MS } from "./live_picture.js";
import { readEvents } from "./sse.js";
import { colourOf, html, useChanges, useEffect, useRef, useState } from "./ui.js";

const MAX_STEPS = 600;
const AGAIN_MS = 3000;
const TABLE_MS = 1000;
const TOPIC = "live";
const PLOT_HEIGHT = 120;

/** What is known of the batch, and the stream that it comes from. */
export class LiveSteps {
  /** @param {import("./ui.js").Changes} changes */
  constructor(changes) {
    this.changes = changes;
    /** @type {Step[]} */
    this.steps = [];
    /** @type {Hello | null} */
    this.hello = null;
    /** A sentence, where nothing can be shown. */
    this.trouble = "";
    /** Of the engine: ready, lost, unloaded or loading. */
    this.engine = "ready";
    /** @type {AbortController | null} */
    this.abort = null;
    /** @type {(step: Step) => void} */
    this.onStep = () => {};
    this.onStart = () => {};
  }

  get newest() {
    return this.steps[this.steps.length - 1];
  }

  /** @param {string} model whose steps; "" is the first */
  start(model) {
    this.stop();
    const abort = new AbortController();
    this.abort = abort;
    this.steps = [];
    this.follow(model, abort.signal);
  }

  stop() {
    this.abort?.abort();
    this.abort = null;
  }

  /**
   * Reads until it is stopped, over as many connections as that takes.
   * @param {string} model
   * @param {AbortSignal} signal
   */
  async follow(model, signal) {
    const query = model ? `?model=${encodeURIComponent(model)}` : "";
    while (!signal.aborted) {
      try {
        const response = await request(`debug/batch/stream${query}`, { signal });
        if (!response.body) return;
        for await (const { event, data } of readEvents(response.body)) this.take(event, JSON.parse(data));
      } catch (error) {
        if (isAbort(error)) return;
        const isAbsent = error instanceof ApiFailure && error.code === "unknown_url";
        this.trouble = isAbsent
          ? "This server has no live picture of its batch."
          : `Nothing comes: ${error instanceof Error ? error.message : error}.`;
        this.changes.tell(TOPIC);
        if (isAbsent) return;
      }
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }

  /**
   * @param {string} event
   * @param {any} value
   */
  take(event, value) {
    if (event === "hello") {
      // A new connection begins with the last minute, which may be another server's.
      this.hello = value;
      this.trouble = "";
      this.steps = [];
      this.engine = "ready";
      this.onStart();
    } else if (event === "engine") {
      this.engine = value.state;
    } else if (event === "step") {
      this.engine = "ready";
      this.steps.push(value);
      if (this.steps.length > MAX_STEPS) this.steps.shift();
      this.onStep(value);
    }
    this.changes.tell(TOPIC);
  }
}

/** @param {{app: App}} props */
export function LivePanel({ app }) {
  const { live } = app;
  useChanges(app.changes, TOPIC);
  const model = app.settings.model;
  useEffect(() => {
    const follow = () => (document.hidden ? live.stop() : live.start(model));
    follow();
    document.addEventListener("visibilitychange", follow);
    return () => {
      document.removeEventListener("visibilitychange", follow);
      live.stop();
    };
  }, [model]);
  if (live.trouble) return html`<section class="panel"><h2>The batch, live</h2><p class="note">${live.trouble}</p></section>`;
  return html`
    <section class="panel" aria-labelledby="live-title">
      <h2 id="live-title">The batch, live</h2>
      ${live.engine === "lost" && html`<p class="fault" role="status">The engine is being restarted; open answers go on with it.</p>`}
      ${live.engine === "unloaded" && html`<p class="note" role="status">The model is not loaded; a question loads it.</p>`}
      ${live.engine === "loading" && html`<p class="note" role="status">The model is being loaded.</p>`}
      <${Summary} live=${live} />
      <${Picture} app=${app} />
      <${Legend} />
      <${Lines} app=${app} />
      <${Table} live=${live} />
    </section>
  `;
}

/** @param {{live: LiveSteps}} props */
function Summary({ live }) {
  const { newest, hello } = live;
  if (!hello) return html`<p class="note">Connecting.</p>`;
  if (!newest) return html`<p class="note">${hello.rows} rows, ${hello.pages} pages of ${hello.page_size} tokens. No step yet.</p>`;
  const { pages } = newest;
  return html`
    <dl class="now">
      <div><dt>Rows</dt><dd>${newest.running} of ${hello.rows}</dd></div>
      <div><dt>Waiting</dt><dd>${newest.waiting}</dd></div>
      <div><dt>Tokens/s</dt><dd>${newest.tok_s.toFixed(0)}</dd></div>
      <div><dt>Longest step</dt><dd>${newest.gap_ms.toFixed(0)} ms</dd></div>
      <div><dt>Pages live</dt><dd>${pages.live}</dd></div>
      <div><dt>Cached</dt><dd>${pages.cached}</dd></div>
      <div><dt>Free</dt><dd>${pages.free}</dd></div>
    </dl>
  `;
}

/** @param {{app: App}} props */
function Picture({ app }) {
  const place = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  const { live } = app;
  useEffect(() => {
    if (!place.current) return undefined;
    const picture = new LivePicture(place.current);
    const redraw = () => picture.redraw(live.steps);
    live.onStart = redraw;
    live.onStep = (step) => {
      if (!picture.add(step)) redraw();
    };
    const watcher = new ResizeObserver(redraw);
    watcher.observe(place.current.parentElement ?? place.current);
    return () => {
      watcher.disconnect();
      live.onStart = live.onStep = () => {};
    };
  }, [app.theme, app.isDark]);
  const { newest } = live;
  const words = newest ? `${newest.running} rows run and ${newest.waiting} wait` : "nothing yet";
  return html`
    <div class="picture">
      <canvas ref=${place} role="img" aria-label=${`Rows over the last ${WINDOW_MS / 1000} seconds: ${words}. A table follows.`}></canvas>
    </div>
  `;
}

function Legend() {
  return html`
    <ul class="legend" aria-label="Colours">
      ${Object.entries(KINDS).map(([kind, words]) => html`<li key=${kind}><span class=${`key-${kind}`}></span>${words}</li>`)}
    </ul>
  `;
}

/** Tokens a second, pages and the longest step over time. @param {{app: App}} props */
function Lines({ app }) {
  const place = useRef(/** @type {HTMLElement | null} */ (null));
  const { live } = app;
  useEffect(() => {
    let isOver = false;
    /** @type {{setData: (data: unknown) => void, destroy: () => void}[]} */
    let plots = [];
    import("./vendor/uplot.js").then((module) => {
      const Plot = /** @type {any} */ (module.default);
      const element = place.current;
      if (isOver || !element) return;
      plots = LINES.map((line) => new Plot(plotOptions(line, element), emptyData(line), element));
    });
    const timer = setInterval(() => {
      LINES.forEach((line, number) => plots[number]?.setData(dataOf(line, live.steps)));
    }, TABLE_MS);
    return () => {
      isOver = true;
      clearInterval(timer);
      for (const plot of plots) plot.destroy();
    };
  }, [app.theme, app.isDark]);
  return html`<div class="lines" ref=${place} aria-hidden="true"></div>`;
}

/** @typedef {{title: string, series: [string, string, (step: Step) => number][]}} Line */

/** @type {Line[]} titles, and of each series its label, its colour's name and its value */
const LINES = [
  { title: "Tokens a second", series: [["tokens/s", "decode", (step) => step.tok_s]] },
  { title: "Longest step, ms", series: [["ms", "prompt", (step) => step.gap_ms]] },
  {
    title: "Pages",
    series: [
      ["live", "decode", (step) => step.pages.live],
      ["cached", "cached", (step) => step.pages.cached],
    ],
  },
];

/** @param {Line} line */
const emptyData = (line) => [[], ...line.series.map(() => [])];

/**
 * @param {Line} line
 * @param {Step[]} steps
 */
function dataOf(line, steps) {
  const newest = steps[steps.length - 1]?.t ?? 0;
  const shown = steps.filter((step) => newest - step.t < WINDOW_MS);
  return [
    shown.map((step) => (step.t - newest) / 1000),
    ...line.series.map(([, , valueOf]) => shown.map(valueOf)),
  ];
}

/**
 * @param {Line} line
 * @param {HTMLElement} element
 */
function plotOptions(line, element) {
  const ink = { stroke: colourOf(element, "faint"), grid: { stroke: colourOf(element, "line"), width: 1 } };
  const seconds = (/** @type {unknown} */ _, /** @type {number[]} */ all) => all.map((each) => `${each} s`);
  const fromZero = (/** @type {unknown} */ _, /** @type {number} */ least, /** @type {number} */ most) => [
    Math.min(0, least),
    Math.max(1, most * 1.1),
  ];
  return {
    title: line.title,
    width: element.clientWidth,
    height: PLOT_HEIGHT,
    legend: { show: false },
    cursor: { show: false },
    scales: { x: { time: false, range: [-WINDOW_MS / 1000, 0] }, y: { range: fromZero } },
    axes: [
      { ...ink, size: 34, values: seconds },
      { ...ink, size: 48 },
    ],
    series: [
      {},
      ...line.series.map(([label, name]) => ({ label, stroke: colourOf(element, `live-${name}`), width: 1.5 })),
    ],
  };
}

/** The same numbers as the picture, once a second. @param {{live: LiveSteps}} props */
function Table({ live }) {
  const [shown, show] = useState(/** @type {Step | undefined} */ (undefined));
  useEffect(() => {
    const timer = setInterval(() => show(live.newest), TABLE_MS);
    return () => clearInterval(timer);
  }, []);
  const rows = shown?.rows ?? [];
  return html`
    <details class="rows">
      <summary>Rows as a table</summary>
      <div class="scroller" tabindex="0">
        <table>
          <thead>
            <tr>${["Row", "State", "Computed", "Known", "Cached", "New", "Drafts"].map((each) => html`<th key=${each} scope="col">${each}</th>`)}</tr>
          </thead>
          <tbody>
            ${rows.map(
              (/** @type {import("./live_picture.js").Row} */ row) => html`
                <tr key=${row.id}>
                  <th scope="row">${row.id}</th>
                  <td>${row.kind}${row.waits_for ? ` for ${row.waits_for}` : ""}${row.preempted ? ", preempted" : ""}</td>
                  <td>${row.computed}</td>
                  <td>${row.total}</td>
                  <td>${row.cached}</td>
                  <td>${row.new}</td>
                  <td>${row.drafts}</td>
                </tr>
              `,
            )}
          </tbody>
        </table>
      </div>
      ${shown?.others && html`<p class="note">And ${shown.others.rows} rows of others.</p>`}
    </details>
  `;
}
