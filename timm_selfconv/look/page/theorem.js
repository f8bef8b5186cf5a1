// @ts-check
// The theorem's page: its state, its controls, its address.
import { ARROWS, calm, choose, element, find, minus, percent, pointAt } from './drawing.js';
import {
  KERNELS, attend, centersOf, convolve, copiesAround, digitsAt, kernel, largestDifference, leakBound, mapsAround,
  reachOf, resize, roundingBound, tapsOf,
} from './maths.js';
import { Digits, Limit, Stage, Tiles, digits, drawHeads, drawKernel, show } from './views.js';

const LEAST = 0.05, MOST = 50, SHARP = 46;  // alpha: ends of the slider, and a value at which both results are equal
const NAMES = {
  shift: 'Shift', blur: 'Blur', gauss: 'Gaussian', edges: 'Edges', upright: 'Vertical edges', sharpen: 'Sharpen',
  emboss: 'Emboss', '': 'Drawn',
};
const still = (/** @type {number} */ size) => Array.from({ length: size * size }, () => [0, 0]);

/** @type {[string, Object<string, any>, string][]} presets as a story: button, change, sentence */
const STORY = [
  ['Shift: one head', { kernel: 'shift', head: 8 },
    'One head is enough. It looks one pixel down and right and passes that pixel on: the photograph moves up and left.'],
  ['Blur: nine alike', { kernel: 'blur', head: 4 },
    'Nine heads, nine shifted copies, each times one ninth: together they blur.'],
  ['Edges: one against eight', { kernel: 'edges', head: 4 },
    'Head 4 counts eight times, and eight neighbours are subtracted: only edges are left.'],
  ['Break it', { kernel: 'edges', head: 2, moved: still(3).map((none, i) => i === 2 ? [-1.5, 2] : none) },
    'Head 2 now looks elsewhere, and the result is no longer this convolution. Drag it back, or put all back.'],
];

/** @type {import('./maths.js').Picture} */
let photo;
let brightest = 1;
const canvas = element('canvas');  // of the photograph, rasterised once

// the address stores this
const state = {
  size: 3, dilation: 1, alpha: 1, kernel: 'edges', weights: kernel('edges', 3), moved: still(3), query: [34, 28], head: 4,
  pin: false, show: 'copies', added: 9,
};
/** Both results, their largest difference, its place and its bound.
 * @type {Object<string, any>} */
const shown = { convolution: null, attention: null, error: 0, at: 0, bound: 0, state: null };

const stages = Object.fromEntries(['photo', 'convolution', 'attention', 'difference', 'heads'].map(
  name => [name, new Stage(name, redraw)]));
const tiles = new Tiles(find('#tiles'), head => update({ head })), limit = new Limit(find('#limit svg'), [LEAST, MOST]);
const table = new Digits(find('#digits'));
const radius = () => reachOf(state) + 3, tileRadius = () => reachOf(state) + 6;
const isMoved = (/** @type {number} */ head) => state.moved[head].some(part => part !== 0);
const many = () => state.size === 3 ? 'nine' : String(state.size ** 2);
let frame = 0, rest = 0, measuring = 0, playing = 0, lit = -1, fresh = false;
/** @type {number[][]} */
let measured = [];

function redraw() {
  if (!frame && photo) frame = requestAnimationFrame(draw);
}

/** Black and white of an output: 0 and 1 if the weights add up to 1, either side of grey if they cancel out. */
function tones(weights = state.weights) {
  const sum = weights.reduce((a, b) => a + b, 0), all = weights.reduce((a, b) => a + Math.abs(b), 0);
  if (all === 0) return [0, 1];
  return Math.abs(sum) < 0.1 * all ? [-all / 8, all / 8] : [Math.min(0, sum), Math.max(0, sum)];
}

const heads = () => state.weights.map((weight, i) => i < state.added ? weight : 0);
const allowedAt = (/** @type {number} */ alpha) =>
  leakBound(state.weights, alpha, brightest) + roundingBound(state.weights, brightest);

function compute() {
  const before = shown.state, changed = names => !before || names.some(name => before[name] !== state[name]);
  const kernel = changed(['photo', 'size', 'dilation', 'weights']), other = kernel || changed(['moved']);
  if (kernel) shown.convolution = convolve(photo, state);
  if (other || changed(['alpha', 'added'])) {
    shown.attention = attend(photo, state, heads());
    [shown.error, shown.at] = largestDifference(shown.convolution, shown.attention);
    shown.bound = allowedAt(state.alpha);
    if (other) measure();
  }
  shown.state = { ...state };
}

/** Measure the difference at other alphas, one at a time. */
function measure() {
  clearTimeout(measuring);
  measured = [];
  const alphas = Array.from({ length: 19 }, (_, i) => LEAST * (MOST / LEAST) ** (i / 18));
  const next = () => {
    if (measured.length === alphas.length) return;
    const alpha = alphas[measured.length];
    measured.push([alpha, largestDifference(shown.convolution, attend(photo, { ...state, alpha }))[0]]);
    drawLimit();
    measuring = setTimeout(next, 40);
  };
  measuring = setTimeout(next, 400);
}

function drawLimit() {
  const allowed = state.moved.some((_, head) => isMoved(head)) ? [] : Array.from({ length: 101 }, (_, i) => {
    const alpha = LEAST * (MOST / LEAST) ** (i / 100);
    return [alpha, allowedAt(alpha)];
  });
  limit.draw(allowed, measured, state.alpha, shown.error);
}

function draw() {
  frame = 0;
  const { query, size, pin, head, added } = state, [black, white] = tones(), { rows, cols } = photo, plane = rows * cols;
  compute();
  show(stages.convolution.pixels, { ...photo, values: shown.convolution }, black, white);
  show(stages.attention.pixels, { ...photo, values: shown.attention }, ...tones(heads()));
  const differences = Float32Array.from({ length: plane }, (_, i) => Math.min(white - black, Math.max(
    ...[0, 1, 2].map(c => Math.abs(shown.convolution[c * plane + i] - shown.attention[c * plane + i])))));
  stages.difference.showMap(differences, rows, cols, white - black);
  for (const name of ['photo', 'convolution', 'attention', 'difference']) stages[name].frame([rows, cols], query, pin);

  const marked = lit < 0 ? head : lit;
  stages.heads.showAround(canvas, reachOf(state), query, radius());
  drawHeads(stages.heads, state, radius(), marked);
  tiles.make(size, 2 * tileRadius() + 1);
  const copies = copiesAround(photo, state, query, tileRadius());
  const maps = state.show === 'maps' ? mapsAround(photo, state, query, tileRadius()) : null;
  const most = maps && Math.max(...maps.map(map => map.reduce((a, b) => b > a ? b : a, 0)));
  tiles.draw(maps || copies, most, state, head, added);
  table.draw(state.weights, digitsAt(photo, state, query, copies), added);
  for (const node of document.querySelectorAll('[data-head]')) {
    node.classList.toggle('lit', Number(/** @type {HTMLElement} */ (node).dataset.head) === lit);
  }
  find('#maps p').textContent = most === null
    ? 'Each tile: the output of a head around the framed pixel, a shifted copy of the photograph, and its weight.'
    : `Each tile: the attention map of a head. Yellow is ${percent(most || 0)}; the framed pixel is the query.`;
  drawLimit();
  drawNumbers(black, white);
}

/** @param {number} black @param {number} white */
function drawNumbers(black, white) {
  const moved = state.moved.flatMap((_, head) => isMoved(head) ? [head] : []), all = state.added === state.size ** 2;
  const { rows, cols } = photo, reach = reachOf(state), row = Math.floor(shown.at / cols) % rows, col = shown.at % cols;
  find('#error').value = shown.error;
  find('#error').textContent = digits(shown.error);
  find('#bound').value = shown.bound;
  find('#bound').textContent = digits(shown.bound);
  find('#promise').hidden = moved.length > 0 || !all;
  find('output[for=alpha]').textContent = digits(state.alpha);
  find('#back').disabled = moved.length === 0;
  find('#undo').disabled = !history.state?.step;
  find('#add').textContent = all ? 'Add them one by one' : 'Add a head';
  find('#whole').hidden = all;
  find('#photo p').textContent = state.pin ? 'Pinned. Click again, or press Escape, to free it.'
    : 'The framed pixel is the query. Click to pin it.';
  find('#convolution p').textContent = `Black is ${digits(black)}, white ${digits(white)}.`;
  const [low, high] = tones(heads());
  find('#attention p').textContent = `The sum of ${all ? '' : `${state.added} of `}${many()} copies. ` +
    `Black is ${digits(low)}, white ${digits(high)}.`;
  const edge = Math.min(row, col, rows - 1 - row, cols - 1 - col) <= reach;
  find('#difference p').textContent = shown.error < 1e-12 ? 'Only rounding.'
    : edge ? 'Largest at the border: the pixels outside are zero.' : `Yellow: a difference of ${digits(white - black)}.`;
  find('#limit p').textContent = moved.length > 0 ? 'A head away from its tap: the difference stays.'
    : 'Dashed: bound of the theorem plus rounding. Solid: measured here.';
  const far = head => digits(Math.hypot(...state.moved[head]));
  const words = !all ? `${state.added} of ${many()} heads are in the sum.`
    : shown.error < 1e-12 ? 'Equal, to the rounding of float64.'
      : shown.error < (white - black) / 255 ? 'Equal on the screen: the difference is less than one of 255 steps.'
        : moved.length === 1 ? `Head ${moved[0]} looks ${far(moved[0])} pixels away from its tap: no longer this convolution.`
          : moved.length > 1 ? `${moved.length} heads look away from their taps: no longer this convolution.`
            : 'Too soft: each head attends to more than one pixel.';
  if (find('#verdict').textContent !== words) find('#verdict').textContent = words;
}

const typed = (/** @type {HTMLInputElement} */ { value }) => Number(value.replace('−', '-').replace(',', '.') || NaN);

/** Set the controls to the state. */
function drawControls() {
  const { elements } = document.forms[0];
  for (const name of ['kernel', 'size', 'dilation', 'show']) {
    const control = /** @type {any} */ (elements.namedItem(name) || find(`#maps form`).elements[name]);
    control.value = String(state[name]);
  }
  find('#alpha').value = 300 * Math.log(state.alpha / LEAST) / Math.log(MOST / LEAST);
  find('#alpha').setAttribute('aria-valuetext', digits(state.alpha));
  for (const node of document.querySelectorAll('.many')) node.textContent = many();
  stages.heads.box.setAttribute('aria-label', `Around the query. The arrow keys move head ${state.head} by a ` +
    'tenth of a pixel, with shift by one; Escape puts it back. Choose another head among the tiles.');
  drawKernel(find('#weights'), state, typed);
}

/** @param {Object<string, any>} change of the state; the first one after step() can be undone */
function update(change) {
  const of = { ...state, ...change }, other = of.size !== state.size;
  if ('kernel' in change && KERNELS[of.kernel]) change = { ...change, weights: kernel(of.kernel, of.size) };
  else if (other && !('weights' in change)) {
    change = {
      ...change, weights: KERNELS[of.kernel] ? kernel(of.kernel, of.size) : resize(state.weights, state.size, of.size),
    };
  }
  if (other) change = { moved: still(of.size), head: (of.size ** 2 - 1) / 2, added: of.size ** 2, ...change };
  clearTimeout(rest);
  if (fresh && ['weights', 'moved', 'dilation'].some(name => name in change)) {
    writeHash();
    fresh = false;
    history.pushState({ step: (history.state?.step || 0) + 1 }, '', location.href);
  }
  Object.assign(state, change);
  drawControls();
  redraw();
  rest = setTimeout(writeHash, 250);  // browsers count how often a page changes its address
}

/** Begin a change that can be undone. */
const step = () => { fresh = true; };

/** @param {number} head @param {number[]} to */
function moveHead(head, to) {
  const limit = radius(), tap = tapsOf(state)[head];
  const held = to.map((offset, axis) => Math.min(limit, Math.max(-limit, offset)) - tap[axis]);
  update({ head, moved: state.moved.map((old, i) => i === head ? held.map(part => Number(part.toFixed(2))) : old) });
}

function writeHash() {
  clearTimeout(rest);
  const { size, dilation, alpha, weights, query, head, moved, pin, show, added } = state;
  const parts = {
    kernel: KERNELS[state.kernel] ? state.kernel : weights.join(','), size, dilation, alpha, query: query.join(','),
    pin: Number(pin), head, show, added,
    moved: moved.flatMap((offset, i) => isMoved(i) ? [`${i}:${offset}`] : []).join(';'),
  };
  history.replaceState(history.state, '', '#' + Object.entries(parts).map(part => part.join('=')).join('&'));
}

/** Read the address, ignoring missing and wrong values. */
function readHash() {
  const hash = new URLSearchParams(location.hash.slice(1)), change = /** @type {Object<string, any>} */ ({});
  const numbers = (/** @type {string} */ text) => text.split(',').map(part => part.trim() === '' ? NaN : Number(part));
  const number = (name, right) => {
    const value = numbers(hash.get(name) || '')[0];
    if (right(value)) change[name] = value;
  };
  number('size', x => [3, 5].includes(x));
  number('dilation', x => [1, 2, 3].includes(x));
  number('alpha', x => x >= 0.01 && x <= 1000);
  const size = change.size || state.size, { kernel = '', query = '', moved = '' } = Object.fromEntries(hash);
  if (Object.hasOwn(KERNELS, kernel)) change.kernel = kernel;
  else {
    const weights = numbers(kernel);
    const right = weights.length === size ** 2 && weights.every(w => Math.abs(w) <= 100);
    if (right) Object.assign(change, { kernel: '', weights });
  }
  const at = numbers(query), inside = [photo.rows, photo.cols];
  if (at.length === 2 && at.every((x, i) => Number.isInteger(x) && x >= 0 && x < inside[i])) change.query = at;
  number('head', x => Number.isInteger(x) && x >= 0 && x < size ** 2);
  change.added = size ** 2;
  number('added', x => Number.isInteger(x) && x >= 0 && x <= size ** 2);
  change.pin = hash.get('pin') === '1';
  if (['copies', 'maps'].includes(hash.get('show') || '')) change.show = hash.get('show');
  change.moved = still(size);
  for (const entry of moved.split(';')) {
    const [head, offset = ''] = entry.split(':'), by = numbers(offset), index = Number(head || NaN);
    if (index in change.moved && by.length === 2 && by.every(x => Math.abs(x) <= 20)) change.moved[index] = by;
  }
  fresh = false;
  update(change);
}

/** From soft to sharp in four seconds, or at once if less motion is preferred. */
function play() {
  const start = performance.now();
  cancelAnimationFrame(playing);
  const step = now => {
    const part = calm() ? 1 : Math.min(1, Math.max(0, now - start) / 4000);
    update({ alpha: Number((0.1 * (10 * SHARP) ** part).toPrecision(3)) });
    if (part < 1) playing = requestAnimationFrame(step);
  };
  step(start);
}

/** Add the next head with a weight to the sum; start again after the last. */
function addHead() {
  const all = state.size ** 2, from = state.added === all ? 0 : state.added;
  const next = state.weights.findIndex((weight, i) => i >= from && weight !== 0), last = next < 0 ? all - 1 : next;
  const none = state.weights.every((weight, i) => i <= last || weight === 0);
  const slid = () => update({ head: last, added: none ? all : last + 1 });
  if (from === 0) update({ added: 0 });
  if (calm()) slid();
  else {
    tiles.slide(last, stages.attention.box, centersOf(state)[last]);
    setTimeout(slid, 800);
  }
}

/** Use the middle of a picture, at the size of the page's pictures. @param {CanvasImageSource} image @param {number[]} size */
function take(image, [width, height]) {
  const side = Math.min(width, height), pixels = canvas.width;
  const context = /** @type {any} */ (canvas.getContext('2d', { willReadFrequently: true }));
  context.fillRect(0, 0, pixels, pixels);
  context.drawImage(image, (width - side) / 2, (height - side) / 2, side, side, 0, 0, pixels, pixels);
  const { data } = context.getImageData(0, 0, pixels, pixels), plane = pixels * pixels;
  const values = Float64Array.from({ length: 3 * plane }, (_, i) => data[4 * (i % plane) + Math.floor(i / plane)] / 255);
  photo = { channels: 3, rows: pixels, cols: pixels, values };
  brightest = values.reduce((a, b) => Math.max(a, b), 0);
  shown.state = null;
  show(stages.photo.pixels, photo);
}

/** @param {File} file */
async function takeFile(file) {
  try {
    const image = await createImageBitmap(file);
    take(image, [image.width, image.height]);
    find('#story').textContent = `The photograph is ${file.name}; it stays on this device.`;
    redraw();
  } catch {
    find('#story').textContent = `${file.name} cannot be read as a picture.`;
  }
}

function listenToKernel() {
  const box = find('#weights');
  const weigh = (cell, weight) => update({
    kernel: '', weights: state.weights.map((old, i) => i === Number(cell.dataset.head) ? weight : old),
  });
  let from = null;  // first cell of a possible stroke; a click alone is for typing
  box.addEventListener('pointerdown', event => {
    if (event.target.hasPointerCapture(event.pointerId)) event.target.releasePointerCapture(event.pointerId);
    from = event.target.closest('input');
    step();
  });
  box.addEventListener('pointermove', event => {
    if (!event.buttons) return;
    for (const { clientX, clientY } of [...event.getCoalescedEvents?.() ?? [], event]) {  // a quick stroke skips none
      const cell = /** @type {any} */ (document.elementFromPoint(clientX, clientY));
      if (!cell || !box.contains(cell) || !cell.dataset.head || cell === from) continue;
      /** @type {any} */ (document.activeElement).blur();
      for (const each of from ? [from, cell] : [cell]) {
        if (state.weights[each.dataset.head] !== Number(find('#pen').value)) weigh(each, Number(find('#pen').value));
      }
      from = null;
    }
  });
  box.addEventListener('dragstart', event => event.preventDefault());  // of text that is selected
  box.addEventListener('input', ({ target }) => {
    if (Math.abs(typed(target)) <= 100) weigh(target, typed(target));
  });
  box.addEventListener('focusin', ({ target }) => {
    step();
    requestAnimationFrame(() => target.select());
  });
  box.addEventListener('focusout', drawControls);
  find('#pen').addEventListener('input', ({ target: { value } }) => {
    find('output[for=pen]').textContent = minus(value);
  });
}

function listenToHeads() {
  const { box } = stages.heads;
  const at = event => pointAt(event, box).map(part => part * (2 * radius() + 1) - radius() - 0.5);
  /** @type {number[] | null} */
  let grip = null;  // offset of the dragged head's centre from the pointer
  box.addEventListener('pointerdown', event => {
    const place = at(event), centers = centersOf(state);
    const far = centers.map(center => Math.hypot(...center.map((offset, axis) => offset - place[axis])));
    const head = far.indexOf(Math.min(...far)), held = centers[head].map((offset, axis) => offset - place[axis]);
    box.setPointerCapture(event.pointerId);
    grip = Math.hypot(...held) > 1 ? null : held;
    step();
    update({ head });
  });
  box.addEventListener('pointermove', event => {
    if (!grip || !event.buttons) return;
    const [down, right] = grip, place = at(event), to = [place[0] + down, place[1] + right], tap = tapsOf(state)[state.head];
    moveHead(state.head, Math.hypot(to[0] - tap[0], to[1] - tap[1]) < 0.2 ? tap : to);
  });
  box.addEventListener('pointerup', () => { grip = null; });
  box.addEventListener('touchstart', event => { if (grip) event.preventDefault(); }, { passive: false });  // else scroll
  box.addEventListener('keydown', event => {
    const { head } = state, by = ARROWS[event.key], far = event.shiftKey ? 1 : 0.1;
    step();
    if (by) moveHead(head, centersOf(state)[head].map((offset, axis) => offset + by[axis] * far));
    else if (event.key === 'Escape' && isMoved(head)) moveHead(head, tapsOf(state)[head]);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
}

function listen() {
  const listenTo = (selector, type, does) => find(selector).addEventListener(type, does);
  const set = (/** @type {any} */ { target: { name, value } }) => {
    step();
    if (name) update({ [name]: ['size', 'dilation'].includes(name) ? Number(value) : value });
  };
  for (const form of document.forms) {
    form.addEventListener('submit', event => event.preventDefault());
    form.addEventListener('change', set);
  }
  STORY.forEach(([name, change, words], i) => {
    const button = element('button', { class: 'tool', type: 'button' }, `${i + 1}  ${name}`);
    button.addEventListener('click', () => {
      step();
      update({ size: 3, dilation: 1, alpha: SHARP, moved: still(3), added: 9, ...change });
      find('#story').textContent = words;
    });
    find('#presets').append(element('li', {}, button));
  });
  find('[name=kernel]').append(...Object.entries(NAMES).map(([value, name]) => element('option', { value }, name)));
  listenTo('#alpha', 'input', ({ target }) => {
    cancelAnimationFrame(playing);
    update({ alpha: Number((LEAST * (MOST / LEAST) ** (target.value / 300)).toPrecision(3)) });
  });
  listenTo('#play', 'click', play);
  listenTo('#add', 'click', addHead);
  listenTo('#whole', 'click', () => update({ added: state.size ** 2 }));
  listenTo('#back', 'click', () => { step(); update({ moved: still(state.size) }); });
  listenTo('#clear', 'click', () => { step(); update({ kernel: '', weights: state.weights.map(() => 0) }); });
  listenTo('#undo', 'click', () => history.back());
  listenTo('#file', 'change', ({ target: { files: [file] } }) => file && takeFile(file));
  listenToKernel();
  listenToHeads();
  for (const name of ['photo', 'convolution', 'attention', 'difference']) {
    const limits = [photo.rows, photo.cols], { box } = stages[name];
    choose(box, {
      pinned: () => state.pin, pin: pin => update({ pin }),
      move: event => update({ query: pointAt(event, box).map((part, axis) => Math.floor(part * limits[axis])) }),
      step: by => update({ query: state.query.map((q, axis) => Math.min(limits[axis] - 1, Math.max(0, q + by[axis]))) }),
    });
  }
  addEventListener('keydown', event => { if (event.key === 'Escape') update({ pin: false }); });
  addEventListener('popstate', readHash);
  document.addEventListener('pointerover', event => {  // a cell, its head, tile and term light up together
    const cell = /** @type {any} */ (event.target).closest?.('[data-head]'), now = cell ? Number(cell.dataset.head) : -1;
    if (now !== lit) redraw();
    lit = now;
  });
}

async function start() {
  const image = find('#source');
  await image.decode();
  canvas.width = canvas.height = image.naturalWidth;
  take(image, [image.naturalWidth, image.naturalHeight]);
  listen();
  readHash();
  document.body.classList.add('live');
  await new Promise(resolve => requestAnimationFrame(() => requestAnimationFrame(resolve)));
}

// for the console, and for tests
Object.assign(globalThis, { state, shown, stages, mapsAround, copiesAround, photoNow: () => photo, ready: start() });
