// @ts-check
// Views of the theorem's page: pictures, the heads around a query, their tiles, digits, the limit.
import { ARROWS, Atlas, PUOR, Screen, contextOf, element, minus } from './drawing.js';
import { centersOf, tapsOf } from './maths.js';

/** @typedef {import('./maths.js').Picture} Picture */
/** @typedef {import('./maths.js').Layer} Layer */

const powers = (/** @type {string} */ text) => text.replace(/./g, c => '⁰¹²³⁴⁵⁶⁷⁸⁹'[c] || '⁻');

/** Three digits for the eye; below a thousandth with a power of ten. @param {number} x */
export function digits(x) {
  if (x === 0 || Math.abs(x) >= 1e-3) return minus(String(Number(x.toPrecision(3))));
  const [front, power] = x.toExponential(1).split('e');
  return minus(`${front} × 10${powers(power)}`);
}

/** A weight in as little room as it takes: two digits, at most four decimals. @param {number} x */
const short = x => minus(String(Number(x.toPrecision(2)) && Number(Number(x.toPrecision(2)).toFixed(4))));

/** A weight's colour, orange below zero and violet above, and the colour of text on it.
 * @param {number} weight @param {number} most */
function weightColours(weight, most) {
  const word = PUOR[Math.round(127.5 + 127.5 * (most ? weight / most : 0))];
  const rgb = [0, 8, 16].map(bits => word >> bits & 255);
  return [`rgb(${rgb})`, rgb[0] + 2 * rgb[1] + rgb[2] / 2 > 450 ? '#000' : '#fff'];
}

const most = (/** @type {number[]} */ weights) => Math.max(...weights.map(Math.abs));

/** Put a picture's planes on a canvas, from black to white; NaN shows the page.
 * @param {HTMLCanvasElement} canvas @param {Picture} picture @param {number} black @param {number} white */
export function show(canvas, { channels, rows, cols, values }, black = 0, white = 1) {
  Object.assign(canvas, { width: cols, height: rows });
  const context = contextOf(canvas), image = context.createImageData(cols, rows), plane = rows * cols;
  for (let i = 0; i < plane; i++) {
    for (let c = 0; c < 3; c++) {
      image.data[4 * i + c] = 255 * (values[c % channels * plane + i] - black) / (white - black);
    }
    image.data[4 * i + 3] = Number.isNaN(values[i]) ? 0 : 255;
  }
  context.putImageData(image, 0, 0);
}

/** A square with its pixels on one canvas, and frames and heads in the screen's pixels on another above it. */
export class Stage {
  /** @param {string} section @param {() => void} redraw */
  constructor(section, redraw) {
    this.box = /** @type {HTMLElement} */ (document.querySelector(`#${section} .stage`));
    const [below, above] = this.box.querySelectorAll('canvas');
    this.pixels = below;
    this.screen = new Screen(above);
    new ResizeObserver(() => {
      this.screen.fit();
      redraw();
    }).observe(this.box);
  }

  /** @returns {import('./drawing.js').Place} */
  get place() {
    return [0, 0, this.screen.canvas.width, this.screen.canvas.height];
  }

  /** @param {Float32Array} map @param {number} rows @param {number} cols @param {number} most */
  showMap(map, rows, cols, most) {
    const atlas = new Atlas(1, [rows, cols]);
    atlas.fill(map, most);
    Object.assign(this.pixels, { width: cols, height: rows });
    contextOf(this.pixels).drawImage(atlas.canvas, 0, 0);
  }

  /** Show a photograph around a query, and the zeros around it.
   * @param {HTMLCanvasElement} photo @param {number} reach @param {number[]} query @param {number} radius */
  showAround(photo, reach, query, radius) {
    Object.assign(this.pixels, { width: 2 * radius + 1, height: 2 * radius + 1 });
    const context = contextOf(this.pixels), [y, x] = query.map(place => radius - place);
    context.fillRect(x - reach, y - reach, photo.width + 2 * reach, photo.height + 2 * reach);
    context.drawImage(photo, x, y);
  }

  /** @param {import('./drawing.js').Pair} grid @param {any} cell @param {boolean} pinned */
  frame(grid, cell, pinned = false) {
    this.screen.clear();
    this.screen.drawFrame(this.place, grid, cell, pinned ? 2.5 : 1.5);
  }
}

/** Draw every head as a dot where it looks, in a circle of its standard deviation, and frame the taps that heads left.
 * @param {Stage} stage @param {Layer} layer @param {number} radius @param {number} chosen */
export function drawHeads(stage, layer, radius, chosen) {
  const { screen } = stage, { context, ratio } = screen, side = 2 * radius + 1, [, , width] = stage.place;
  const cell = width / side, dot = Math.min(11 * ratio, 0.38 * cell * layer.dilation), { weights, moved } = layer;
  const x = (/** @type {number} */ offset) => (offset + radius + 0.5) * cell, centers = centersOf(layer);
  const circle = (row, col, size) => {
    context.beginPath();
    context.arc(x(col), x(row), size, 0, 2 * Math.PI);
  };
  const outline = (/** @type {number} */ thick) => ['#000', '#fff'].forEach((colour, i) => {
    context.lineWidth = (2 - i) * thick * ratio;
    context.strokeStyle = colour;
    context.stroke();
  });
  stage.frame([side, side], [radius, radius]);
  centers.forEach(([row, col], head) => {
    circle(row, col, cell / Math.sqrt(2 * layer.alpha));
    context.globalAlpha = 0.16;
    [context.fillStyle] = weightColours(weights[head], most(weights));
    context.fill();
    context.globalAlpha = head === chosen ? 1 : 0.45;
    outline(1);
    context.globalAlpha = 1;
  });
  tapsOf(layer).forEach(([row, col], head) => {
    const [down, right] = moved[head];
    if (down === 0 && right === 0) return;
    screen.drawFrame(stage.place, [side, side], [row + radius, col + radius], 0.75);
    context.beginPath();
    context.moveTo(x(col), x(row));
    context.lineTo(x(col + right), x(row + down));
    outline(1.5);
  });
  Object.assign(context, { textAlign: 'center', textBaseline: 'middle' });
  for (const head of [...centers.keys()].sort((a, b) => Number(a === chosen) - Number(b === chosen))) {
    const [row, col] = centers[head], [colour, text] = weightColours(weights[head], most(weights));
    circle(row, col, dot);
    outline(head === chosen ? 4 : 2);
    context.fillStyle = colour;
    context.fill();
    context.fillStyle = text;
    context.font = `${head === chosen ? 700 : 400} ${1.05 * dot}px system-ui, sans-serif`;
    context.fillText(String(head), x(col), x(row) + 0.06 * dot);
  }
}

/** The heads, a button each: a head's copy of the photograph around the query, or its attention. */
export class Tiles {
  /** @param {HTMLElement} box @param {(head: number) => void} choose */
  constructor(box, choose) {
    this.box = box;
    this.choose = choose;
    /** @type {{ canvas: HTMLCanvasElement, button: HTMLElement, label: HTMLElement }[]} */
    this.tiles = [];
  }

  /** @param {number} size @param {number} side */
  make(size, side) {
    if (this.tiles.length === size * size && this.side === side) return;
    this.side = side;
    this.box.dataset.size = String(size);
    this.box.style.setProperty('--cell', `${100 / side}%`);
    this.tiles = Array.from({ length: size * size }, (_, head) => {
      const canvas = element('canvas', { width: side, height: side }), label = element('span');
      const button = element('button', { class: 'tile', type: 'button', 'data-head': head },
        element('div', {}, canvas), element('span', {}, element('b', {}, String(head)), label));
      button.addEventListener('click', () => this.choose(head));
      button.addEventListener('keydown', event => {
        const [down, right] = ARROWS[event.key] || [0, 0], next = this.tiles[head + size * down + right];
        if (!next || !(down || right)) return;
        event.preventDefault();
        next.button.focus();
        next.button.click();
      });
      return { canvas, button, label };
    });
    this.box.replaceChildren(...this.tiles.map(({ button }) => button));
  }

  /** Draw copies of the photograph, or maps in parts of `most`.
   * @param {Float64Array[]} images @param {number | null} most @param {Layer} layer @param {number} chosen
   * @param {number} added */
  draw(images, most, { weights, moved }, chosen, added) {
    const side = this.side || 1, atlas = most === null ? null : new Atlas(1, [side, side]);
    this.tiles.forEach(({ canvas, button, label }, head) => {
      if (atlas) {
        atlas.fill(images[head], most || 0);
        contextOf(canvas).clearRect(0, 0, side, side);
        contextOf(canvas).drawImage(atlas.canvas, 0, 0);
      } else show(canvas, { channels: 3, rows: side, cols: side, values: images[head] });
      label.textContent = ` × ${short(weights[head])}`;
      button.setAttribute('aria-label', `Head ${head}, weight ${digits(weights[head])}` +
        (moved[head].some(part => part !== 0) ? ', away from its tap' : ''));
      button.setAttribute('aria-pressed', String(head === chosen));
      button.classList.toggle('waiting', head >= added);
      button.tabIndex = head === chosen ? 0 : -1;  // one tab stop
    });
  }

  /** Slide a head's copy from where the photograph is to where the head takes it, and into a sum.
   * @param {number} head @param {Element} sum @param {number[]} offset pixels that the head is away from the query */
  slide(head, sum, [down, right]) {
    const { canvas } = this.tiles[head], { left, top, width } = canvas.getBoundingClientRect();
    const to = sum.getBoundingClientRect(), pixel = width / (this.side || 1);
    const ghost = element('canvas', { class: 'ghost', width: canvas.width, height: canvas.height });
    contextOf(ghost).drawImage(canvas, 0, 0);
    Object.assign(ghost.style, { left: `${left}px`, top: `${top}px`, width: `${width}px` });
    document.body.append(ghost);
    const move = `translate(${to.left - left}px, ${to.top - top}px) scale(${to.width / width})`;
    ghost.animate([
      { transform: `translate(${right * pixel}px, ${down * pixel}px)` }, { transform: 'none', offset: 0.4 },
      { transform: 'none', offset: 0.55 }, { transform: move, opacity: 0.1 },
    ], { duration: 1000, easing: 'ease-in-out' }).finished.then(() => ghost.remove());
  }
}

/** Two equal sums of products, cell by cell: weight x pixel, and weight x output of the head. */
export class Digits {
  /** @param {HTMLElement} box */
  constructor(box) {
    this.grids = [...box.querySelectorAll('.grid')].map(grid => /** @type {HTMLElement} */ (grid));
    this.sums = box.querySelectorAll('output');
  }

  /** @param {number[]} weights @param {number[][]} values pixel and attended value of each tap @param {number} added */
  draw(weights, values, added) {
    this.grids.forEach((grid, of) => {
      if (grid.children.length !== weights.length) {
        grid.replaceChildren(...weights.map((_, i) => element('span', { 'data-head': i })));
      }
      grid.style.setProperty('--many', String(Math.sqrt(weights.length)));
      weights.forEach((weight, i) => {
        grid.children[i].textContent = `${short(weight)} × ${values[i][of].toFixed(2)}`;
        grid.children[i].classList.toggle('waiting', of === 1 && i >= added);
      });
      const sum = weights.reduce((sum, w, i) => sum + (of === 1 && i >= added ? 0 : w * values[i][of]), 0);
      this.sums[of].textContent = `= ${minus(sum.toFixed(4))}`;
    });
  }
}

/** Colour the cells of a kernel, and write its weights unless one is being typed.
 * @param {HTMLElement} box @param {Layer} layer @param {(cell: HTMLInputElement) => number} typed */
export function drawKernel(box, { size, weights }, typed) {
  box.style.setProperty('--many', String(size));
  if (box.children.length !== weights.length) {
    box.replaceChildren(...weights.map((_, i) => element('input', {
      type: 'text', inputmode: 'decimal', autocomplete: 'off', 'data-head': i,
      'aria-label': `Weight at row ${Math.floor(i / size) + 1}, column ${i % size + 1}`,
    })));
  }
  [.../** @type {any} */ (box.children)].forEach((cell, i) => {
    [cell.style.background, cell.style.color] = weightColours(weights[i], most(weights));
    if (cell !== document.activeElement || typed(cell) !== weights[i]) cell.value = short(weights[i]);
  });
}

/** Differences over sharpness, both in powers of ten: allowed, measured, and where one is. */
export class Limit {
  /** @param {SVGElement} svg @param {number[]} range of alpha */
  constructor(svg, [least, most]) {
    this.svg = svg;
    this.x = (/** @type {number} */ alpha) => 36 + 252 * Math.log(alpha / least) / Math.log(most / least);
    this.y = (/** @type {number} */ error) => 10 + 9.5 * (2 - Math.max(-18, Math.min(2, Math.log10(error))));
    this.axes = [
      ...[0, -4, -8, -12, -16].flatMap(power => [
        this.make('line', { class: 'grid', x1: 36, x2: 288, y1: this.y(10 ** power), y2: this.y(10 ** power) }),
        this.make('text', { x: 31, y: this.y(10 ** power) + 3.5, 'text-anchor': 'end' },
          power ? `10${powers(String(power))}` : '1')]),
      ...[0.1, 1, 10, 46].map(alpha =>
        this.make('text', { x: this.x(alpha), y: 214, 'text-anchor': 'middle' }, String(alpha))),
      this.make('text', { x: 162, y: 229, 'text-anchor': 'middle' }, 'sharpness α')];
  }

  /** @param {string} tag @param {Object<string, any>} attributes @param {...string} text */
  make(tag, attributes, ...text) {
    const made = document.createElementNS('http://www.w3.org/2000/svg', tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...text);
    return made;
  }

  /** @param {number[][]} allowed @param {number[][]} measured @param {number} alpha @param {number} error */
  draw(allowed, measured, alpha, error) {
    const [x, y] = [this.x(alpha), this.y(error)], line = (points, cls) => this.make(
      'polyline', { class: cls, points: points.map(([a, e]) => `${this.x(a)},${this.y(e)}`).join(' ') });
    this.svg.replaceChildren(
      ...this.axes, line(allowed, 'allowed'), line(measured, 'measured'),
      this.make('line', { class: 'now', x1: x, x2: x, y1: 10, y2: 200 }),
      this.make('circle', { class: 'now', cx: x, cy: y, r: 5 }));
  }
}
