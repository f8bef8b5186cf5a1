// Colours, maps and frames on canvases.

// 256 colours, as words of a canvas's pixels, between some in hexadecimal
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
// the figures' own, which colour-blind readers can read: viridis, and for weights of either sign matplotlib's PuOr
const VIRIDIS = ramp('440154', '472d7b', '3b528b', '2c728e', '21918c', '28ae80', '5ec962', 'addc30', 'fde725');
const PUOR = ramp(
  '7f3b08', 'b35806', 'e08214', 'fdb863', 'fee0b6', 'f7f7f7', 'd8daeb', 'b2abd2', '8073ac', '542788', '2d004b');

const largest = (map, middle = 0) => map.reduce((most, value) => Math.max(most, Math.abs(value - middle)), 0);

// Maps in their own pixels, one below the other, to be drawn from.
class Atlas {
  constructor(maps, [height, width], middle = 0, signed = false) {
    this.canvas = element('canvas', { width, height: maps * height });
    Object.assign(this, { width, height, middle, signed });
    this.context = this.canvas.getContext('2d');
    this.image = this.context.createImageData(width, maps * height);
    this.words = new Uint32Array(this.image.data.buffer);
  }
  // Maps in parts of `most`, or of each one's own largest; a sheer one shows a picture where a head doesn't look.
  fill(maps, most, sheer = false) {
    const size = this.width * this.height, { middle, signed, words, image } = this;
    for (let start = 0; start < maps.length; start += size) {
      const scale = 1 / (most || largest(maps.subarray(start, start + size), middle) || 1);
      for (let k = start; k < start + size; k++) {
        const part = (maps[k] - middle) * scale;
        words[k] = signed ? PUOR[Math.round(127.5 + 127.5 * part)] : VIRIDIS[Math.round(255 * Math.sqrt(part))];
        if (sheer) image.data[4 * k + 3] = signed ? 200 : 255 * 0.7 * Math.sqrt(part);
      }
    }
    this.context.putImageData(image, 0, 0);
  }
}

// A canvas in the screen's pixels. A browser paints one large canvas several times faster than fifty small ones.
class Screen {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext('2d');
  }
  fit() {
    this.box = this.canvas.getBoundingClientRect();
    this.ratio = devicePixelRatio;
    this.canvas.width = Math.round(this.box.width * this.ratio);
    this.canvas.height = Math.round(this.box.height * this.ratio);
  }
  // where an element lies on the canvas, [left, top, width, height]
  place(element) {
    const box = element.getBoundingClientRect();
    const place = [box.left - this.box.left, box.top - this.box.top, box.width, box.height];
    return place.map(x => Math.round(x * this.ratio));
  }
  clear() {
    this.context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.context.imageSmoothingEnabled = false;
  }
  drawMap(atlas, number, place) {
    this.context.drawImage(atlas.canvas, 0, number * atlas.height, atlas.width, atlas.height, ...place);
  }
  // A frame around one cell of a grid, which stays free: white in black, so that one of them shows on any colour.
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

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

// where a pointer is on an element, [row, column] in parts of its height and width
function pointAt(event, node) {
  const box = node.getBoundingClientRect(), part = x => Math.min(0.9999, Math.max(0, x));
  return [part((event.clientY - box.top) / box.height), part((event.clientX - box.left) / box.width)];
}

const minus = text => text.replace('-', '−');
const percent = part => `${(100 * part).toFixed(1)} %`;
