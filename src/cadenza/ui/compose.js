/**
 * Where a message is written, sent and stopped.
 *
 * @typedef {import("./app.js").App} App
 */
import { ACCEPTED, Pictures, readPictures } from "./images.js";
import { html, useChanges, useEffect, useRef, useState } from "./ui.js";

/** On a touch screen Enter makes a new line, and only the button sends. */
const isTouch = matchMedia("(pointer: coarse)");

/** @param {{app: App}} props */
export function Compose({ app }) {
  useChanges(app.changes, "chat");
  const [text, setText] = useState("");
  const [images, setImages] = useState(/** @type {import("./images.js").Picture[]} */ ([]));
  const input = useRef(/** @type {HTMLTextAreaElement | null} */ (null));
  const isBusy = app.isBusy;
  useEffect(() => {
    app.focusInput = () => input.current?.focus();
    app.focusInput();
  }, []);

  const takesImages = app.takesImages;
  const isEmpty = !text.trim() && !images.length;
  const send = () => {
    if (isBusy || isEmpty) return;
    setText("");
    setImages([]);
    app.send(text, images);
  };
  const attach = async (/** @type {Iterable<File>} */ files) => {
    try {
      const read = await readPictures(files, images.length);
      setImages((/** @type {typeof images} */ before) => [...before, ...read]);
      app.say("");
    } catch (error) {
      app.say(error instanceof Error ? error.message : "The image cannot be read.");
    }
    app.focusInput();
  };
  /** Files are attached; a text goes its usual way. */
  const given = (/** @type {Event} */ event, /** @type {DataTransfer | null} */ data) => {
    if (!takesImages || !data?.files.length) return;
    event.preventDefault();
    attach([...data.files]);
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
      onPaste=${(/** @type {ClipboardEvent} */ event) => given(event, event.clipboardData)}
      onDragOver=${(/** @type {DragEvent} */ event) => takesImages && event.preventDefault()}
      onDrop=${(/** @type {DragEvent} */ event) => given(event, event.dataTransfer)}
      onSubmit=${(/** @type {Event} */ event) => {
        event.preventDefault();
        send();
      }}
    >
      <${Pictures}
        pictures=${images}
        onRemove=${(/** @type {number} */ place) => setImages(images.filter((_, each) => each !== place))}
      />
      ${takesImages &&
      html`<label class="file">
        <span>Image</span>
        <input
          type="file"
          multiple
          accept=${ACCEPTED}
          onChange=${(/** @type {any} */ event) => {
            attach([...event.target.files]);
            event.target.value = "";
          }}
        />
      </label>`}
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
        : html`<button type="submit" class="primary" disabled=${isEmpty}>Send</button>`}
    </form>
  `;
}
