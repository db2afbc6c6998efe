/**
 * The picture of the batch over time, on a canvas: a lane for each request, a column for each event.
 * The picture moves to the left by what an event's time takes, and only the new column is drawn, so
 * its cost follows from the rows of one event. Lanes are given again once their request is gone.
 *
 * @typedef {{id: number, kind: "prompt" | "decode" | "waiting", computed: number, total: number,
 *   cached: number, new: number, drafts: number, preempted: number, waits_for: string | null}} Row
 * @typedef {{t: number, tokens: number, steps: number, waiting: number, running: number,
 *   pages: {live: number, cached: number, free: number}, tok_s: number, gap_ms: number, rows: Row[],
 *   others: {rows: number} | null}} Step
 * @typedef {{kind: string, prompt: number, cached: number, new: number, drafts: number,
 *   preempted: number}} Part what a row did in the time of one column
 */

import { colourOf } from "./ui.js";

export const WINDOW_MS = 60_000;
const MIN_LANES = 8;
const LANE_PX = 12;
const MAX_LANES = 48;
const MARK_PX = 4;

/** The colours of the picture, by the names of its CSS variables. */
export const KINDS = {
  waiting: "Waiting",
  prompt: "Prompt computed",
  cached: "Prompt from the cache",
  decode: "Tokens sampled",
  drafts: "Drafts accepted",
  preempted: "Preempted",
};

export class LivePicture {
  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.canvas = canvas;
    this.context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d", { alpha: false }));
    /** @type {Map<number, number>} lanes by labels */
    this.lanes = new Map();
    /** @type {Map<number, number>} tokens computed until now, by labels */
    this.computed = new Map();
    /** @type {Map<number, Part>} of a column that is not a pixel wide yet, by labels */
    this.due = new Map();
    this.numLanes = MIN_LANES;
    /** @type {number | null} */
    this.lastAt = null;
    /** Pixels that are due, less than one. */
    this.rest = 0;
    /** @type {Map<string, string>} */
    this.colours = new Map();
  }

  /**
   * Draws all that is known again, after a change of size or colours.
   * @param {Step[]} steps
   */
  redraw(steps) {
    for (const name of ["back", ...Object.keys(KINDS)]) {
      this.colours.set(name, colourOf(this.canvas, `live-${name}`));
    }
    const scale = Math.min(devicePixelRatio || 1, 2);
    this.canvas.width = Math.max(1, Math.round(this.canvas.clientWidth * scale));
    this.canvas.height = this.numLanes * LANE_PX * scale;
    this.canvas.style.height = `${this.numLanes * LANE_PX}px`;
    this.fill("back", 0, 0, this.canvas.width, this.canvas.height);
    this.lastAt = null;
    this.rest = 0;
    this.lanes.clear();
    this.computed.clear();
    this.due.clear();
    const newest = steps[steps.length - 1]?.t ?? 0;
    for (const step of steps) if (newest - step.t < WINDOW_MS) this.add(step);
  }

  /**
   * Draws a column. Returns false where a lane is missing: then all has to be drawn again.
   * @param {Step} step
   */
  add(step) {
    const width = this.columnWidth(step.t);
    const { width: all, height } = this.canvas;
    if (width > 0) {
      this.context.drawImage(this.canvas, -width, 0);
      this.fill("back", all - width, 0, width, height);
    }
    const isFitting = this.giveLanes(step.rows);
    for (const row of step.rows) this.collect(row);
    if (width > 0) {
      const laneHeight = height / this.numLanes;
      for (const [id, part] of this.due) {
        const lane = this.lanes.get(id);
        if (lane !== undefined) this.drawPart(part, all - width, lane * laneHeight, width, laneHeight - 1);
      }
      this.due.clear();
    }
    return isFitting;
  }

  /** @param {Row} row */
  collect(row) {
    const isNew = !this.computed.has(row.id);
    const before = this.computed.get(row.id) ?? row.cached;
    this.computed.set(row.id, row.computed);
    const part = this.due.get(row.id) ?? { kind: "", prompt: 0, cached: 0, new: 0, drafts: 0, preempted: 0 };
    part.kind = row.kind;
    part.prompt += row.kind === "waiting" ? 0 : Math.max(0, row.computed - before - row.new);
    part.cached += isNew ? row.cached : 0;
    part.new += row.new;
    part.drafts += row.drafts;
    part.preempted += row.preempted;
    this.due.set(row.id, part);
  }

  /** @param {number} at */
  columnWidth(at) {
    const passed = this.lastAt === null ? 100 : Math.max(0, Math.min(at - this.lastAt, WINDOW_MS));
    this.lastAt = at;
    this.rest += (passed / WINDOW_MS) * this.canvas.width;
    const width = Math.floor(this.rest);
    this.rest -= width;
    return width;
  }

  /** @param {Row[]} rows */
  giveLanes(rows) {
    const present = new Set(rows.map((row) => row.id));
    for (const id of [...this.lanes.keys()]) if (!present.has(id)) this.lanes.delete(id);
    for (const id of [...this.computed.keys()]) if (!present.has(id)) this.computed.delete(id);
    const taken = new Set(this.lanes.values());
    let lane = 0;
    for (const { id } of rows) {
      if (this.lanes.has(id)) continue;
      while (taken.has(lane)) lane += 1;
      if (lane >= MAX_LANES) return true; // the table has the rest
      taken.add(lane);
      this.lanes.set(id, lane);
    }
    const needed = Math.max(0, ...this.lanes.values()) + 1;
    if (needed <= this.numLanes) return true;
    this.numLanes = Math.min(MAX_LANES, Math.ceil(needed / MIN_LANES) * MIN_LANES);
    return false;
  }

  /**
   * @param {Part} part
   * @param {number} x
   * @param {number} y
   * @param {number} width
   * @param {number} height
   */
  drawPart(part, x, y, width, height) {
    this.fill(part.kind, x, y, width, height);
    if (part.prompt > 0 && part.kind === "decode") {
      // From below: the prompt's share of the tokens that were computed.
      const share = part.prompt / (part.prompt + part.new);
      this.fill("prompt", x, y + height * (1 - share), width, height * share);
    }
    const mark = Math.min(height, MARK_PX);
    if (part.cached > 0) this.fill("cached", x, y + height - mark, Math.max(width, 3), mark);
    if (part.drafts > 0) this.fill("drafts", x, y, width, mark);
    if (part.preempted > 0) this.fill("preempted", x, y, Math.max(width, 2), height);
  }

  /**
   * @param {string} name
   * @param {number} x
   * @param {number} y
   * @param {number} width
   * @param {number} height
   */
  fill(name, x, y, width, height) {
    this.context.fillStyle = this.colours.get(name) ?? "#888";
    this.context.fillRect(x, y, width, height);
  }
}
