/**
 * Where a message is written, sent and stopped.
 *
 * @typedef {import("./app.js").App} App
 */
import { html, useChanges, useEffect, useRef, useState } from "./ui.js";

/** On a touch screen Enter makes a new line, and only the button sends. */
const isTouch = matchMedia("(pointer: coarse)");

/** @param {{app: App}} props */
export function Compose({ app }) {
  useChanges(app.changes, "chat");
  const [text, setText] = useState("");
  const input = useRef(/** @type {HTMLTextAreaElement | null} */ (null));
  const isBusy = app.isBusy;
  useEffect(() => {
    app.focusInput = () => input.current?.focus();
    app.focusInput();
  }, []);

  const send = () => {
    if (isBusy || !text.trim()) return;
    setText("");
    app.send(text);
  };
  const keyed = (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || isTouch.matches) return;
    event.preventDefault();
    send();
  };
  return html`
    <form
      class="compose"
      aria-label="Your message"
      onSubmit=${(/** @type {Event} */ event) => {
        event.preventDefault();
        send();
      }}
    >
      <label class="hidden" for="message">Message</label>
      <textarea
        id="message"
        ref=${input}
        rows=${Math.min(8, text.split("\n").length + 1)}
        value=${text}
        placeholder=${isTouch.matches ? "Message" : "Message (Enter sends, Shift+Enter is a new line)"}
        onInput=${(/** @type {any} */ event) => setText(event.target.value)}
        onKeyDown=${keyed}
      ></textarea>
      ${isBusy
        ? html`<button type="button" class="primary" onClick=${() => app.stop()}>Stop</button>`
        : html`<button type="submit" class="primary" disabled=${!text.trim()}>Send</button>`}
    </form>
  `;
}
