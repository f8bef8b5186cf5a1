// @ts-check
// Colours, maps and frames on canvases, and how a pointer chooses a pixel. Both pages use it.

/** @typedef {[number, number]} Pair row and column, or height and width */
/** @typedef {[number, number, number, number]} Place left, top, width, height */

/**
 * 256 colours between some in hexadecimal, as words of a canvas's pixels.
 * @param {...string} hexes
 */
function ramp(...hexes) {
  const bytes = new Uint8ClampedArray(4 * 256), ends = hexes.length - 1;
  const colours = hexes.map(hex => [0, 2, 4].map(i => parseInt(hex.slice(i, i + 2), 16)));
  for (let i = 0; i < 256; i++) {
    const place = i / 255 * ends, n = Math.min(ends - 1, Math.floor(place)), part = place - n;
    for (let c = 0; c < 3; c++) bytes[4 * i + c] = colours[n][c] * (1 - part) + colours[n + 1][c] * part;
    bytes[4 * i + 3] = 255;
  }
  return new Uint32Array(bytes.buffer);
}
// the figures' colours, which colour-blind readers can tell apart: viridis, and for signed weights matplotlib's PuOr
const VIRIDIS = ramp('440154', '472d7b', '3b528b', '2c728e', '21918c', '28ae80', '5ec962', 'addc30', 'fde725');
export const PUOR = ramp(
  '7f3b08', 'b35806', 'e08214', 'fdb863', 'fee0b6', 'f7f7f7', 'd8daeb', 'b2abd2', '8073ac', '542788', '2d004b');

/** @param {Float32Array | Float64Array} map @param {number} middle */
export function largest(map, middle = 0) {
  let most = 0;
  for (let k = 0; k < map.length; k++) most = Math.max(most, Math.abs(map[k] - middle));
  return most;
}

/** @param {HTMLCanvasElement} canvas @returns {CanvasRenderingContext2D} */
export const contextOf = canvas => /** @type {CanvasRenderingContext2D} */ (canvas.getContext('2d'));

/** @template {keyof HTMLElementTagNameMap} T @param {T} tag @param {Object<string, any>} attributes
 * @param {...(Node | string)} children @returns {HTMLElementTagNameMap[T]} */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** @returns {any} the first element of a selector, which the page has */
export const find = (/** @type {string} */ selector) => document.querySelector(selector);

/** Maps in their own pixels, one below the other, to be drawn from. */
export class Atlas {
  /** @param {number} maps @param {Pair} shape @param {number} middle @param {boolean} signed */
  constructor(maps, [height, width], middle = 0, signed = false) {
    this.canvas = element('canvas', { width, height: maps * height });
    this.width = width;
    this.height = height;
    this.middle = middle;
    this.signed = signed;
    this.context = contextOf(this.canvas);
    this.image = this.context.createImageData(width, maps * height);
    this.words = new Uint32Array(this.image.data.buffer);
  }

  /** Draw maps in parts of `most`, or of each one's own largest; a sheer one lets a picture below show where they are 0.
   * @param {Float32Array | Float64Array} maps @param {number} most @param {boolean} sheer */
  fill(maps, most = 0, sheer = false) {
    const size = this.width * this.height, { middle, signed, words, image } = this;
    for (let start = 0; start < maps.length; start += size) {
      const scale = 1 / (most || largest(maps.subarray(start, start + size), middle) || 1);
      for (let k = start; k < start + size; k++) {
        const part = (maps[k] - middle) * scale;
        words[k] = signed ? PUOR[Math.round(127.5 + 127.5 * part)] : VIRIDIS[Math.round(255 * Math.sqrt(part))] || 0;
        if (sheer) image.data[4 * k + 3] = signed ? 200 : 255 * 0.7 * Math.sqrt(part);
      }
    }
    this.context.putImageData(image, 0, 0);
  }
}

/** A canvas in the screen's pixels. A browser paints one large canvas several times faster than fifty small ones. */
export class Screen {
  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.canvas = canvas;
    this.context = contextOf(canvas);
    this.ratio = 1;
    this.box = new DOMRect();
  }

  fit() {
    this.box = this.canvas.getBoundingClientRect();
    this.ratio = devicePixelRatio;
    this.canvas.width = Math.round(this.box.width * this.ratio);
    this.canvas.height = Math.round(this.box.height * this.ratio);
  }

  /** @param {Element} node @returns {Place} where an element lies on the canvas */
  place(node) {
    const box = node.getBoundingClientRect(), { left, top } = this.box, round = x => Math.round(x * this.ratio);
    return [round(box.left - left), round(box.top - top), round(box.width), round(box.height)];
  }

  clear() {
    this.context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.context.imageSmoothingEnabled = false;
  }

  /** @param {Atlas} atlas @param {number} number @param {Place} place */
  drawMap(atlas, number, place) {
    this.context.drawImage(atlas.canvas, 0, number * atlas.height, atlas.width, atlas.height, ...place);
  }

  /** Draw a frame around one cell of a grid, which stays free: white in black, so that it shows on any colour.
   * @param {Place} place @param {Pair} grid @param {Pair} cell @param {number} thick */
  drawFrame([left, top, width, height], [rows, cols], [row, col], thick) {
    const { context } = this, line = Math.max(1, Math.round(thick * this.ratio));  // whole, so that lines are pure
    const x = part => Math.round(left + part * width / cols), y = part => Math.round(top + part * height / rows);
    context.lineWidth = line;
    ['#fff', '#000'].forEach((colour, i) => {
      const out = (i + 0.5) * line;
      context.strokeStyle = colour;
      context.strokeRect(x(col) - out, y(row) - out, x(col + 1) - x(col) + 2 * out, y(row + 1) - y(row) + 2 * out);
    });
  }
}

/** @type {Object<string, Pair>} */
export const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

/** Where a pointer is on an element, in parts of its height and width.
 * @param {MouseEvent} event @param {Element} node @returns {Pair} */
export function pointAt(event, node) {
  const box = node.getBoundingClientRect(), part = x => Math.min(0.9999, Math.max(0, x));
  return [part((event.clientY - box.top) / box.height), part((event.clientX - box.left) / box.width)];
}

/** Let a pointer choose: a mouse moves the query until a click pins it, the next click frees it; a finger moves it.
 * @param {HTMLElement} box
 * @param {{ pinned: () => boolean, pin: (on: boolean) => void, move: (event: PointerEvent) => void,
 *           hover?: (event: PointerEvent) => void, step: (by: Pair) => void }} query */
export function choose(box, { pinned, pin, move, hover, step }) {
  let finger = false;
  box.addEventListener('pointerdown', event => {
    finger = event.pointerType !== 'mouse';
    if (finger || !pinned()) move(event);
  });
  box.addEventListener('pointermove', event => {
    if (event.pointerType !== 'mouse' || !pinned()) move(event);
    hover?.(event);
  });
  box.addEventListener('click', () => pin(finger || !pinned()));
  box.addEventListener('keydown', event => {
    if (ARROWS[event.key]) step(ARROWS[event.key]);
    else if ([' ', 'Enter'].includes(event.key)) pin(!pinned());
    else return;
    event.preventDefault();
  });
}

export const minus = (/** @type {string} */ text) => text.replaceAll('-', '−');
export const percent = (/** @type {number} */ part) => `${(100 * part).toFixed(1)} %`;

/** Whether people prefer less motion. */
export const calm = () => matchMedia('(prefers-reduced-motion: reduce)').matches;
