/**
 * Images that go with a message: files as data URLs, and their pictures. Knows neither the page's
 * state nor the server; what is too large or no image is refused with a text that says so.
 *
 * @typedef {{name: string, url: string}} Picture
 */
import { html } from "./ui.js";

/** Of one message; the server's bound is on a whole conversation. */
const MAX_IMAGES = 8;
const MAX_BYTES = 20 << 20;
const TYPES = ["image/jpeg", "image/png", "image/webp", "image/gif"];
const URL_FORM = /^data:image\/(?:jpeg|png|webp|gif);base64,[A-Za-z0-9+/]+=*$/;
const MAX_NAME_CHARS = 200;

export const ACCEPTED = TYPES.join(",");

/**
 * The images of dropped, pasted or chosen files. Throws an Error that says what cannot be taken.
 * @param {Iterable<File>} files
 * @param {number} numBefore of the message already
 * @returns {Promise<Picture[]>}
 */
export async function readPictures(files, numBefore) {
  const given = [...files];
  if (numBefore + given.length > MAX_IMAGES) throw new Error(`A message takes at most ${MAX_IMAGES} images.`);
  for (const file of given) {
    if (!TYPES.includes(file.type)) throw new Error(`${file.name}: images are JPEG, PNG, WebP or GIF.`);
    if (file.size > MAX_BYTES) throw new Error(`${file.name}: it has over ${MAX_BYTES >> 20} MiB.`);
    if (!file.size) throw new Error(`${file.name}: the file is empty.`);
  }
  return Promise.all(given.map(async (file) => ({ name: file.name.slice(0, MAX_NAME_CHARS), url: await dataUrl(file) })));
}

/**
 * @param {File} file
 * @returns {Promise<string>}
 */
function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(new Error(`${file.name}: the browser cannot read it.`));
    reader.readAsDataURL(file);
  });
}

/**
 * The pictures out of a file or the browser's store, which anybody may have written; only images in
 * data URLs, so that none is asked for at another address.
 * @param {any} given
 * @returns {Picture[]}
 */
export function picturesOf(given) {
  if (!Array.isArray(given)) return [];
  const found = given.slice(0, MAX_IMAGES).filter((each) => typeof each?.url === "string" && URL_FORM.test(each.url));
  return found.map((each) => ({ name: typeof each.name === "string" ? each.name.slice(0, MAX_NAME_CHARS) : "", url: each.url }));
}

/** @param {{pictures: Picture[], onRemove?: (place: number) => void}} props */
export function Pictures({ pictures, onRemove }) {
  if (!pictures.length) return null;
  return html`
    <ul class="pictures" aria-label="Images">
      ${pictures.map(
        (each, place) => html`
          <li key=${place}>
            <img src=${each.url} alt=${each.name || "image"} title=${each.name} />
            ${onRemove &&
            html`<button type="button" aria-label=${`Remove ${each.name}`} onClick=${() => onRemove(place)}>×</button>`}
          </li>
        `,
      )}
    </ul>
  `;
}
