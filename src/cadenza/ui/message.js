/**
 * A message of the conversation, with what can be done with it.
 *
 * @typedef {import("./app.js").App} App
 * @typedef {import("./conversation.js").Message} Message
 * @typedef {import("./conversation.js").Figures} Figures
 * @typedef {import("./conversation.js").Call} Call
 */
import { versions } from "./conversation.js";
import { Pictures } from "./images.js";
import { GrowingMarkdown } from "./markdown.js";
import { Prove } from "./prove.js";
import { copyFrom, html, useChanges, useLayoutEffect, useRef, useState } from "./ui.js";

/** @type {Record<string, string>} */
const ENDS = {
  stopped: "Stopped.",
  length: "The bound on tokens was reached.",
  cut: "This answer was cut.",
};

/**
 * @param {{app: App, message: Message}} props
 */
export function MessageView({ app, message }) {
  useChanges(app.changes, message.id);
  const isUser = message.role === "user";
  const name = isUser ? "You" : message.model || "Assistant";
  return html`
    <article class=${`message ${message.role}`} aria-label=${isUser ? "Your message" : "Answer"} id=${`m-${message.id}`}>
      <header><h2 class="who">${name}</h2><${Versions} app=${app} message=${message} /></header>
      ${isUser ? html`<${UserText} app=${app} message=${message} />` : html`<${AnswerText} app=${app} message=${message} />`}
    </article>
  `;
}

/** @param {{app: App, message: Message}} props */
function Versions({ app, message }) {
  const all = versions(app.conversation, message);
  if (all.length < 2) return null;
  const place = all.indexOf(message);
  const step = (/** @type {number} */ by) => () => app.showMessage(all[place + by].id);
  return html`
    <span class="versions">
      <button type="button" aria-label="Earlier version" disabled=${place === 0} onClick=${step(-1)}>‹</button>
      <span>${place + 1} of ${all.length}</span>
      <button type="button" aria-label="Later version" disabled=${place === all.length - 1} onClick=${step(1)}>›</button>
    </span>
  `;
}

/** @param {{app: App, message: Message}} props */
function UserText({ app, message }) {
  const [draft, setDraft] = useState(/** @type {string | null} */ (null));
  if (draft === null) {
    return html`
      <${Pictures} pictures=${message.images} />
      ${message.text && html`<div class="text plain">${message.text}</div>`}
      <div class="actions">
        <${Copy} text=${message.text} />
        <button type="button" disabled=${app.isBusy} onClick=${() => setDraft(message.text)}>Edit</button>
      </div>
    `;
  }
  const send = () => {
    setDraft(null);
    app.edit(message, draft);
  };
  return html`
    <textarea
      aria-label="Edit your message"
      rows="4"
      value=${draft}
      onInput=${(/** @type {any} */ event) => setDraft(event.target.value)}
    ></textarea>
    <div class="actions">
      <button type="button" class="primary" disabled=${!draft.trim() && !message.images.length} onClick=${send}>Send as a new version</button>
      <button type="button" onClick=${() => setDraft(null)}>Cancel</button>
    </div>
  `;
}

/** @param {{app: App, message: Message}} props */
function AnswerText({ app, message }) {
  const isWriting = message.state === "writing";
  const answer = app.answers.get(message.id);
  const isEmpty = !message.text && !message.thinking && !message.calls.length;
  return html`
    ${message.thinking && html`<${Thinking} message=${message} />`}
    <${Grown} text=${message.text} isWhole=${!isWriting} />
    ${message.calls.map((call) => html`<${CallView} key=${call.id} app=${app} message=${message} call=${call} />`)}
    ${isWriting && isEmpty && html`<p class="waiting"><span class="dots" aria-hidden="true"></span> Waiting for the first token</p>`}
    ${answer?.note && html`<p class="note" role="status">${answer.note}</p>`}
    ${message.error && html`<p class="fault" role="alert">${message.error}</p>`}
    ${!message.error && ENDS[message.state] && html`<p class="note">${ENDS[message.state]}</p>`}
    ${message.figures && html`<${FiguresLine} figures=${message.figures} />`}
    ${!isWriting && answer?.receipt && html`<${Prove} key=${answer?.requestId} answer=${answer} />`}
    ${!isWriting && html`<${AnswerActions} app=${app} message=${message} />`}
  `;
}

/** @param {{text: string, isWhole: boolean}} props */
function Grown({ text, isWhole }) {
  const place = useRef(null);
  const grown = useRef(/** @type {GrowingMarkdown | null} */ (null));
  useLayoutEffect(() => {
    if (!place.current) return;
    grown.current ??= new GrowingMarkdown(place.current);
    grown.current.update(text, isWhole);
  }, [text, isWhole]);
  return html`<div class="text md" ref=${place}></div>`;
}

/** @param {{message: Message}} props */
function Thinking({ message }) {
  const isThinking = message.state === "writing" && !message.text;
  return html`
    <details class="thinking">
      <summary>${isThinking ? "Thinking" : "Thought"}, ${message.thinking.length.toLocaleString()} characters</summary>
      <div class="text plain">${message.thinking}</div>
    </details>
  `;
}

/** @param {{app: App, message: Message, call: Call}} props */
function CallView({ app, message, call }) {
  const [result, setResult] = useState(call.result ?? "");
  const isAsked = call.result === undefined && message.state !== "writing";
  return html`
    <div class="call">
      <p><strong>Calls</strong> <code>${call.name}</code></p>
      <pre tabindex="0"><code>${pretty(call.arguments)}</code></pre>
      ${call.result !== undefined && html`<p><strong>Result</strong></p><pre tabindex="0"><code>${call.result}</code></pre>`}
      ${isAsked &&
      html`
        <label class="wide">
          Its result
          <textarea rows="2" value=${result} onInput=${(/** @type {any} */ event) => setResult(event.target.value)}></textarea>
        </label>
        <button type="button" disabled=${app.isBusy} onClick=${() => app.giveResult(message, call, result)}>Give the result</button>
      `}
    </div>
  `;
}

/** @param {string} text */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** @param {{figures: Figures}} props */
function FiguresLine({ figures }) {
  const parts = [`${figures.tokens} tokens`];
  if (figures.perSecond !== null) parts.push(`${figures.perSecond.toFixed(1)} tokens/s`);
  if (figures.firstMs !== null) parts.push(`first after ${shownMs(figures.firstMs)}`);
  if (figures.prompt !== null) {
    const cached = figures.cached ? `, ${figures.cached} of them cached` : "";
    parts.push(`prompt ${figures.prompt}${cached}`);
  }
  return html`<p class="figures">${parts.join(" · ")}</p>`;
}

/** @param {number} ms */
const shownMs = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);

/** @param {{app: App, message: Message}} props */
function AnswerActions({ app, message }) {
  const isBusy = app.isBusy;
  return html`
    <div class="actions">
      <${Copy} text=${message.text} />
      <button type="button" disabled=${isBusy} onClick=${() => app.regenerate(message)}>Regenerate</button>
      <button type="button" disabled=${isBusy || !message.text} onClick=${() => app.goOn(message)}>Continue</button>
    </div>
  `;
}

/** @param {{text: string}} props */
function Copy({ text }) {
  return html`<button type="button" onClick=${(/** @type {any} */ event) => copyFrom(event.currentTarget, text)}>Copy</button>`;
}
