/**
 * "Prove it": has the server compute an answer again from its receipt, and shows both bit for bit.
 *
 * @typedef {import("./answer.js").Answer} Answer
 * @typedef {{token_ids: number[], logprobs: number[], logprob_digest: string,
 *   system_fingerprint: string}} Receipt
 * @typedef {{equal: boolean, alone: boolean, beside: number, tokens: number[], logprobs: number[],
 *   bits: string[], digest: string, expected_digest: string, fingerprint: string,
 *   first_difference: number | null}} Replay
 */
import { requestJson } from "./api.js";
import { copyFrom, html, useState } from "./ui.js";

export const MAX_PROVED_TOKENS = 512;
const COMMAND = "cadenza replay receipt.json";

/** @param {{answer: Answer}} props of this session, with a receipt */
export function Prove({ answer }) {
  const receipt = /** @type {Receipt} */ (JSON.parse(answer.receipt));
  const [state, setState] = useState(/** @type {"" | "asked"} */ (""));
  const [fault, setFault] = useState("");
  const [replay, setReplay] = useState(/** @type {Replay | null} */ (null));
  const isLong = receipt.token_ids.length > MAX_PROVED_TOKENS;
  const prove = async () => {
    setState("asked");
    setFault("");
    try {
      setReplay(await requestJson("v1/receipts/replay", { json: `{"receipt":${answer.receipt}}` }));
    } catch (error) {
      setFault(error instanceof Error ? error.message : String(error));
    }
    setState("");
  };
  const label = replay ? "Prove it again" : "Prove it";
  return html`
    <div class="prove">
      <button type="button" disabled=${isLong || state === "asked"} onClick=${prove}>
        ${state === "asked" ? "Computing it again" : label}
      </button>
      ${isLong && html`<p class="note">Over ${MAX_PROVED_TOKENS} tokens: download the receipt and run ${COMMAND}.</p>`}
      <button type="button" onClick=${() => download(answer.receipt)}>Receipt</button>
      ${fault && html`<p class="fault" role="alert">It was not computed again: ${fault}.</p>`}
      ${replay && html`<${Verdict} receipt=${receipt} replay=${replay} />`}
    </div>
  `;
}

/** @param {{receipt: Receipt, replay: Replay}} props */
function Verdict({ receipt, replay }) {
  const count = receipt.token_ids.length;
  const where = replay.alone
    ? "alone, with nothing else in the batch"
    : `in another row, among ${replay.beside} other ${replay.beside === 1 ? "request" : "requests"}`;
  const place = replay.first_difference === null ? "" : ` First difference: token ${replay.first_difference + 1}.`;
  return html`
    <div role="status">
      <p class=${replay.equal ? "good" : "fault"}>
        <strong>${replay.equal ? "Equal, bit for bit." : `Not equal.${place}`}</strong>
        ${" "}${count} tokens and their log probabilities were computed again, ${where}${replay.alone ? "." : "; prove it again on an idle server for alone."}
      </p>
      <dl class="digests">
        <dt>Then</dt><dd class="hex">${replay.expected_digest.slice(0, 32)}…</dd>
        <dt>Again</dt><dd class="hex">${replay.digest.slice(0, 32)}…</dd>
        <dt>Fingerprint</dt><dd class="hex">${replay.fingerprint}</dd>
      </dl>
      <${Bits} receipt=${receipt} replay=${replay} />
      <p class="note">
        On another machine: <code class="mono">${COMMAND}</code>${" "}
        <button type="button" onClick=${(/** @type {any} */ event) => copyFrom(event.currentTarget, COMMAND)}>Copy</button>
      </p>
    </div>
  `;
}

/** @param {{receipt: Receipt, replay: Replay}} props */
function Bits({ receipt, replay }) {
  return html`
    <details class="rows">
      <summary>Every token, and the bits of its log probability</summary>
      <div class="scroller tall" tabindex="0">
        <table class="hex">
          <thead>
            <tr>${["", "Token", "Again", "Bits", "Again"].map((each, place) => html`<th key=${place} scope="col">${each}</th>`)}</tr>
          </thead>
          <tbody>
            ${receipt.token_ids.map((token, place) => {
              const then = hexOf(receipt.logprobs[place]);
              const again = replay.bits[place] ?? "none";
              const isEqual = token === replay.tokens[place] && then === again;
              return html`
                <tr key=${place} class=${isEqual ? "" : "fault"}>
                  <th scope="row">${place + 1}</th>
                  <td>${token}</td>
                  <td>${replay.tokens[place] ?? "none"}</td>
                  <td>${then}</td>
                  <td>${again}</td>
                </tr>
              `;
            })}
          </tbody>
        </table>
      </div>
    </details>
  `;
}

/**
 * The bits of a number as float32, in hex.
 * @param {number} value
 */
function hexOf(value) {
  const view = new DataView(new ArrayBuffer(4));
  view.setFloat32(0, value);
  return view.getUint32(0).toString(16).padStart(8, "0");
}

/** @param {string} receipt */
function download(receipt) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([receipt], { type: "application/json" }));
  link.download = "receipt.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
