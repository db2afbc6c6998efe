/** Server-sent events over `fetch`, which can send a key; `EventSource` cannot. */

const MAX_EVENT_CHARS = 32 << 20;

/**
 * The events of a body. It ends when the body ends, whether or not an event was whole.
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<{event: string, data: string}>}
 */
export async function* readEvents(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  const parts = new EventParts();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parts.take(decoder.decode(value, { stream: true }));
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Cuts text into events, wherever the text was cut on its way. */
export class EventParts {
  constructor() {
    this.rest = "";
  }

  /**
   * @param {string} text
   * @returns {{event: string, data: string}[]} the events that are whole now
   */
  take(text) {
    this.rest += text;
    if (this.rest.length > MAX_EVENT_CHARS) throw new Error("an event of the server is too long");
    const blocks = this.rest.split(/\r?\n\r?\n/);
    this.rest = blocks.pop() ?? "";
    return blocks.map(eventOf).filter((each) => each.data !== "");
  }
}

/** @param {string} block */
function eventOf(block) {
  let event = "message";
  /** @type {string[]} */
  const data = [];
  for (const line of block.split(/\r?\n/)) {
    const [, name, value] = /^([^:]*):? ?(.*)$/.exec(line) ?? [];
    if (name === "data") data.push(value);
    else if (name === "event") event = value;
  }
  return { event, data: data.join("\n") };
}
