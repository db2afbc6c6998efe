/**
 * One answer from request to end. Owns its stream: what comes is added to the message, faults are
 * put into words there, and nothing that came is lost.
 *
 * @typedef {import("./conversation.js").Message} Message
 * @typedef {{message: Message, body: Record<string, unknown>, onChange: () => void}} Asked
 */
import { ApiFailure, cancel, isAbort, request, trouble } from "./api.js";
import { readEvents } from "./sse.js";

const SILENCE_MS = 1500;
const WATCH_MS = 1000;
const MAX_TRIES = 6;
const MAX_WAIT_S = 15;
/** What came at once, as after a pause of the browser, has no rate. */
const LEAST_RATED_S = 0.05;
/** What the codes of the server's errors mean to who waits, where it is worth to wait. */
const PASSING = new Map([
  ["loading", "The model is being loaded"],
  ["engine_restarting", "The engine is being restarted"],
  ["queue_full", "The server's queue is full"],
  ["connections_full", "The server has too many connections"],
  ["draining", "The server is being replaced"],
]);

export class Answer {
  /** @param {Asked} asked */
  constructor({ message, body, onChange }) {
    this.message = message;
    this.body = body;
    this.onChange = onChange;
    this.abort = new AbortController();
    this.requestId = "";
    /** What there is to say while it is written. */
    this.note = "";
    this.needsKey = false;
    /** What `cadenza replay` takes, as it came: a seed is no number of JavaScript. */
    this.receipt = "";
    this.hasNoReceipts = false;
    this.sentAt = 0;
    this.firstAt = 0;
    this.lastAt = 0;
    this.firstTokens = 0;
    this.isDone = false;
  }

  get isRunning() {
    return this.message.state === "writing";
  }

  /** Resolves when the answer has ended, however that was. */
  async run() {
    this.message.state = "writing";
    this.message.error = "";
    const watching = setInterval(() => this.watch(), WATCH_MS);
    this.onChange();
    try {
      await this.read(await this.send());
    } catch (error) {
      this.fail(error);
    } finally {
      clearInterval(watching);
      if (this.isRunning) this.message.state = "done";
      this.note = "";
      this.onChange();
    }
  }

  /** Ends it; what came stays. */
  stop() {
    if (!this.isRunning) return;
    this.message.state = "stopped";
    this.abort.abort();
    if (this.requestId) cancel(this.requestId);
    this.onChange();
  }

  /** The stream's response; asks again while what keeps the server from answering will pass. */
  async send() {
    for (let tries = 1; ; tries += 1) {
      this.sentAt = this.lastAt = performance.now();
      try {
        const response = await request("v1/chat/completions", { body: this.body, signal: this.abort.signal });
        this.note = "";
        return response;
      } catch (error) {
        if (error instanceof ApiFailure && error.param === "receipt" && this.body.receipt) {
          // Constrained answers and some engines have none.
          delete this.body.receipt;
          this.hasNoReceipts = true;
          continue;
        }
        const cause = error instanceof ApiFailure ? (PASSING.get(error.code) ?? "") : "";
        if (!(error instanceof ApiFailure) || !cause || tries === MAX_TRIES) throw error;
        const seconds = Math.min(error.retryAfter ?? 2 ** tries, MAX_WAIT_S);
        this.note = `${cause}; the request is sent again in ${seconds} s.`;
        this.onChange();
        await this.pause(seconds * 1000);
      }
    }
  }

  /** @param {Response} response */
  async read(response) {
    this.requestId = response.headers.get("x-request-id") ?? "";
    if (!response.body) throw new ApiFailure(0, { message: "the answer has no body" });
    for await (const { data } of readEvents(response.body)) {
      this.lastAt = performance.now();
      this.note = "";
      if (data === "[DONE]") {
        this.isDone = true;
        break;
      }
      this.take(JSON.parse(data));
      this.receipt = memberText(data, "receipt") || this.receipt;
      this.onChange();
    }
    if (!this.isDone && this.isRunning) throw new ApiFailure(0, { message: "the stream ended early" });
  }

  /** @param {any} chunk */
  take(chunk) {
    if (chunk.error) throw new ApiFailure(200, chunk.error);
    if (chunk.model) this.message.model = chunk.model;
    const [choice] = chunk.choices ?? [];
    if (choice) this.takeChoice(choice);
    if (chunk.usage) this.count(chunk.usage);
  }

  /** @param {any} choice */
  takeChoice(choice) {
    const { message } = this;
    const delta = choice.delta ?? {};
    const thought = delta.reasoning ?? delta.reasoning_content ?? "";
    const calls = delta.tool_calls ?? [];
    if (!this.firstAt && (delta.content || thought || calls.length)) this.firstAt = performance.now();
    message.text += delta.content ?? "";
    message.thinking += thought;
    for (const call of calls) this.takeCall(call);
    if (choice.finish_reason) message.state = choice.finish_reason === "length" ? "length" : "writing";
  }

  /** @param {any} given */
  takeCall(given) {
    const { calls } = this.message;
    const place = given.index ?? calls.length;
    calls[place] ??= { id: "", name: "", arguments: "" };
    const call = calls[place];
    const made = given.function ?? given.custom ?? {};
    call.id = given.id ?? call.id;
    call.name += made.name ?? "";
    call.arguments += made.arguments ?? made.input ?? "";
  }

  /** @param {any} usage */
  count(usage) {
    const tokens = usage.completion_tokens ?? 0;
    if (tokens && !this.firstTokens) this.firstTokens = tokens;
    const seconds = (this.lastAt - this.firstAt) / 1000;
    const more = tokens - this.firstTokens;
    this.message.figures = {
      firstMs: this.firstAt ? this.firstAt - this.sentAt : null,
      tokens,
      perSecond: this.firstAt && more > 0 && seconds > LEAST_RATED_S ? more / seconds : null,
      prompt: usage.prompt_tokens ?? null,
      cached: usage.prompt_tokens_details?.cached_tokens ?? null,
    };
  }

  /** Says why nothing comes, if that is known. */
  async watch() {
    if (!this.isRunning || performance.now() - this.lastAt < SILENCE_MS) return;
    const code = await trouble();
    if (!this.isRunning || performance.now() - this.lastAt < SILENCE_MS) return;
    if (code === "engine_restarting") {
      this.note = "The engine is being restarted; resuming, this answer goes on with it.";
    } else if (code === "unreachable") {
      this.note = "The server cannot be reached; what came is kept.";
    } else {
      const seconds = Math.round((performance.now() - this.lastAt) / 1000);
      this.note = this.firstAt ? `Nothing for ${seconds} s.` : `The prompt waits or is computed: ${seconds} s.`;
    }
    this.onChange();
  }

  /** @param {unknown} error */
  fail(error) {
    const { message } = this;
    if (message.state === "stopped" || isAbort(error)) {
      message.state = "stopped";
      return;
    }
    const isLost = !(error instanceof ApiFailure) || error.status === 0;
    message.state = isLost ? "cut" : "failed";
    this.needsKey = error instanceof ApiFailure && error.status === 401;
    const words = error instanceof Error ? error.message : String(error);
    message.error = isLost ? "The connection to the server was lost; what came is kept." : words;
  }

  /** @param {number} ms */
  pause(ms) {
    return new Promise((resolve, reject) => {
      const end = () => reject(new DOMException("stopped", "AbortError"));
      this.abort.signal.addEventListener("abort", end, { once: true });
      setTimeout(resolve, ms);
    });
  }
}

/**
 * The text of an object that is a member of a JSON text, however deep; "" without one.
 * @param {string} json
 * @param {string} name
 */
export function memberText(json, name) {
  // Within a string each quote has a backslash before it, so this is found in no string.
  const found = new RegExp(`"${name}":\\s*(?={)`).exec(json);
  if (!found) return "";
  const from = found.index + found[0].length;
  let depth = 0;
  for (const { 0: part, index } of json.slice(from).matchAll(/"(?:[^"\\]|\\.)*"|[{}]/g)) {
    if (part === "{") depth += 1;
    if (part === "}") depth -= 1;
    if (depth === 0) return json.slice(from, from + index + 1);
  }
  return "";
}
