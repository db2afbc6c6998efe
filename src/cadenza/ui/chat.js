/**
 * The shown path of a conversation. It follows an answer only while the reader is at its end.
 *
 * @typedef {import("./app.js").App} App
 * @typedef {import("./conversation.js").Message} Message
 */
import { pathTo, versions } from "./conversation.js";
import { MessageView } from "./message.js";
import { html, useChanges, useEffect, useRef, useState } from "./ui.js";

const NEAR_PX = 60;

/** @param {{app: App}} props */
export function Chat({ app }) {
  useChanges(app.changes, "chat");
  const scroller = useRef(/** @type {HTMLElement | null} */ (null));
  const isFollowing = useRef(true);
  const [isAway, setAway] = useState(false);

  const follow = () => {
    const found = scroller.current;
    if (found && isFollowing.current) found.scrollTop = found.scrollHeight;
  };
  const scrolled = () => {
    const found = scroller.current;
    if (!found) return;
    isFollowing.current = found.scrollHeight - found.scrollTop - found.clientHeight < NEAR_PX;
    setAway(!isFollowing.current);
  };
  const toEnd = () => {
    isFollowing.current = true;
    follow();
  };
  // After the messages, which listen to their own topics, have been rendered.
  useEffect(() => app.changes.listen("grown", () => requestAnimationFrame(follow)), []);
  useEffect(toEnd, [app.conversation.id, app.conversation.leaf]);

  const path = pathTo(app.conversation);
  return html`
    <div class="log" role="log" aria-live="off" aria-label="Conversation" tabindex="0" ref=${scroller} onScroll=${scrolled}>
      ${path.length === 0 && html`<${Welcome} app=${app} />`}
      ${path.map((message) => html`<${Place} key=${message.id} app=${app} message=${message} />`)}
    </div>
    ${isAway && html`<button type="button" class="to-end" onClick=${toEnd}>To the end ↓</button>`}
  `;
}

/** @param {{app: App, message: Message}} props */
function Place({ app, message }) {
  const partner = message.beside ? app.conversation.messages[message.beside] : undefined;
  if (!partner) return html`<${MessageView} app=${app} message=${message} />`;
  const pair = versions(app.conversation, message).filter((each) => each === message || each === partner);
  return html`
    <div class="pair">
      ${pair.map(
        (each) => html`
          <div key=${each.id} class=${each === message ? "side chosen" : "side"}>
            <${MessageView} app=${app} message=${each} />
            ${each === message
              ? html`<p class="note">The conversation goes on with this answer.</p>`
              : html`<button type="button" disabled=${app.isBusy} onClick=${() => app.showMessage(each.id)}>Go on with this one</button>`}
          </div>
        `,
      )}
    </div>
  `;
}

/** @param {{app: App}} props */
function Welcome({ app }) {
  const model = app.shownModel;
  return html`
    <div class="welcome">
      <p><strong>${model ? model.id : "No model yet"}</strong></p>
      ${model?.max_model_len && html`<p>Context of ${model.max_model_len.toLocaleString()} tokens.</p>`}
      <p>
        Conversations stay in this browser${app.store.isKept ? "" : " until the page is closed"}. What you send is
        batched with everybody else's requests; it is answered exactly as it would be alone.
      </p>
    </div>
  `;
}
