// What the page shows: the state, its controls, its address.

const find = selector => document.querySelector(selector), data = JSON.parse(find('#data').textContent);
const LEAST = 0.05, MOST = 50;  // of the slider for alpha

// plane after plane, from 0 to 1
const photo = { channels: 3, rows: data.size, cols: data.size, values: new Float64Array(3 * data.size ** 2) };
Array.from(atob(data.pixels), (byte, i) => {
  photo.values[i % 3 * data.size ** 2 + Math.floor(i / 3)] = byte.charCodeAt(0) / 255;
});
const brightest = photo.values.reduce((a, b) => Math.max(a, b), 0);

// what the address holds; weights of a kernel with a name are that kernel's
const state = { size: 3, dilation: 1, alpha: 1, kernel: 'edges', query: [34, 28], head: 4 };
state.weights = kernel(state.kernel, state.size);
state.moved = state.weights.map(() => [0, 0]);

// what is on the page: both results, and the largest difference between them
const shown = { convolution: null, attention: null, error: 0, bound: 0 };
const NAMES = {
  blur: 'Blur', gauss: 'Gaussian', edges: 'Edges', upright: 'Vertical', sharpen: 'Sharpen', emboss: 'Emboss',
  shift: 'Shift',
};
const stages = Object.fromEntries(
  ['photo', 'convolution', 'attention', 'difference', 'heads'].map(name => [name, new Stage(name)]));
const tiles = new Tiles(find('#tiles'), head => update({ head })), limit = new Limit(find('#limit svg'), [LEAST, MOST]);
const radius = () => reachOf(state) + 3;
const isMoved = head => state.moved[head].some(part => part !== 0);
let frame = 0, rest = 0, measuring = 0, playing = 0, measured = [];

function redraw() {
  if (!frame) frame = requestAnimationFrame(draw);
}

// black and white of an output: 0 and 1 if the weights add up to 1, either side of grey if they cancel out
function tones() {
  const sum = state.weights.reduce((a, b) => a + b, 0), all = state.weights.reduce((a, b) => a + Math.abs(b), 0);
  if (all === 0) return [0, 1];
  return Math.abs(sum) < 0.1 * all ? [-all / 8, all / 8] : [Math.min(0, sum), Math.max(0, sum)];
}

function compute() {
  const before = shown.layer, layer = { ...state };
  const changed = names => !before || names.some(name => JSON.stringify(before[name]) !== JSON.stringify(layer[name]));
  const kernel = changed(['size', 'dilation', 'weights']);
  if (kernel) shown.convolution = convolve(photo, layer);
  if (kernel || changed(['alpha', 'moved'])) {
    shown.attention = attend(photo, layer);
    shown.error = largestDifference(shown.convolution, shown.attention);
    shown.bound = leakBound(layer.weights, layer.alpha, brightest);
    if (kernel || changed(['moved'])) measure();
  }
  shown.layer = layer;
  return kernel;
}

// The error at other alphas, one at a time whenever there is nothing else to do.
function measure() {
  clearTimeout(measuring);
  measured = [];
  const alphas = Array.from({ length: 19 }, (_, i) => LEAST * (MOST / LEAST) ** (i / 18));
  const next = () => {
    if (measured.length === alphas.length) return;
    const alpha = alphas[measured.length];
    measured.push([alpha, largestDifference(shown.convolution, attend(photo, { ...shown.layer, alpha }))]);
    drawLimit();
    measuring = setTimeout(next, 40);
  };
  measuring = setTimeout(next, 400);
}

function drawLimit() {
  const allowed = state.moved.some((_, head) => isMoved(head)) ? [] : Array.from({ length: 101 }, (_, i) => {
    const alpha = LEAST * (MOST / LEAST) ** (i / 100);
    return [alpha, leakBound(state.weights, alpha, brightest)];
  });
  limit.draw(allowed, measured, state.alpha, shown.error);
}

function draw() {
  frame = 0;
  const { query, size } = state, grid = [photo.rows, photo.cols], [black, white] = tones();
  if (compute()) stages.convolution.show({ ...photo, values: shown.convolution }, black, white);
  stages.photo.show(photo);
  stages.attention.show({ ...photo, values: shown.attention }, black, white);
  const plane = photo.rows * photo.cols, differences = Float32Array.from({ length: plane }, (_, i) =>
    Math.min(white - black, Math.max(...[0, 1, 2].map(c =>
      Math.abs(shown.convolution[c * plane + i] - shown.attention[c * plane + i])))));
  stages.difference.showMap(differences, ...grid, white - black);
  for (const name of ['photo', 'convolution', 'attention', 'difference']) stages[name].frame(grid, query);

  stages.heads.show(around(photo, state, query, radius()));
  drawHeads(stages.heads, state, radius(), state.head);
  if (tiles.size !== `${size} ${radius()}`) tiles.make(size, radius());
  tiles.size = `${size} ${radius()}`;
  const most = tiles.draw(mapsAround(photo, state, query, radius()), state, state.head);
  find('#maps p').textContent = `Brightest: ${percent(most)} of a head’s attention. The query is framed.`;
  find('#convolution p').textContent = find('#attention p').textContent =
    `Black is ${digits(black)}, white ${digits(white)}.`;
  find('#difference p').textContent = `Yellow is ${digits(white - black)}, as far as white from black.`;
  drawLimit();
  drawNumbers();
}

function drawNumbers() {
  const moved = state.moved.flatMap((_, head) => isMoved(head) ? [head] : []), [black, white] = tones();
  find('#error').value = shown.error;
  find('#error').textContent = digits(shown.error);
  find('#bound').value = shown.bound;
  find('#bound').textContent = digits(shown.bound);
  find('#promise').hidden = moved.length > 0;
  find('output[for=alpha]').textContent = digits(state.alpha);
  find('#back').disabled = moved.length === 0;
  find('#limit p').textContent = moved.length > 0 ? 'With a head off its tap the difference stays.'
    : 'Dashed: what Lemma 2 allows. Solid: measured here.';
  const far = head => digits(Math.hypot(...state.moved[head]));
  const words = shown.error < 1e-12 ? 'Equal, to the rounding of float64.'
    : shown.error < (white - black) / 255 ? 'Equal to the eye: less than one step of a screen’s 255.'
      : moved.length === 1 ? `Head ${moved[0] + 1} is ${far(moved[0])} pixels off its tap: not this convolution.`
        : moved.length > 1 ? `${moved.length} heads are off their taps: not this convolution.`
          : 'Too soft: every head sees its tap’s neighbours, too.';
  if (find('#verdict').textContent !== words) find('#verdict').textContent = words;
}

const typed = ({ value }) => Number(value.replace('−', '-').replace(',', '.') || NaN);

// The controls, from the state.
function drawControls() {
  const { elements } = document.forms[0], many = state.weights.length;
  for (const name of ['size', 'dilation']) elements[name].value = state[name];
  for (const input of find('#kernels').querySelectorAll('input')) input.checked = input.value === state.kernel;
  find('#alpha').value = 300 * Math.log(state.alpha / LEAST) / Math.log(MOST / LEAST);
  find('#alpha').setAttribute('aria-valuetext', digits(state.alpha));
  find('.many').textContent = many === 9 ? 'nine' : many;
  stages.heads.box.setAttribute('aria-label', `Around the query. The arrow keys move head ${state.head + 1} by a ` +
    'tenth of a pixel, with shift by one; Escape puts it back. Choose another head among the maps.');
  const box = find('#weights');
  box.style.setProperty('--many', state.size);
  if (box.children.length !== many) {
    box.replaceChildren(...state.weights.map((_, i) => element('input', {
      type: 'text', inputmode: 'decimal', autocomplete: 'off', 'data-tap': i,
      'aria-label': `Weight at row ${Math.floor(i / state.size) + 1}, column ${i % state.size + 1}`,
    })));
  }
  const most = Math.max(...state.weights.map(Math.abs));
  [...box.children].forEach((cell, i) => {
    const [colour, text] = weightColours(state.weights[i], most);
    cell.style.background = colour;
    cell.style.color = text;
    if (cell !== document.activeElement || typed(cell) !== state.weights[i]) {
      cell.value = minus(String(Number(state.weights[i].toPrecision(2))));
    }
  });
}

function update(change) {
  const of = { ...state, ...change };
  if ('kernel' in change && KERNELS[of.kernel]) change = { ...change, weights: kernel(of.kernel, of.size) };
  else if (of.size !== state.size && !('weights' in change)) {
    change = {
      ...change, weights: KERNELS[of.kernel] ? kernel(of.kernel, of.size) : resize(state.weights, state.size, of.size),
    };
  }
  if (of.size !== state.size) {
    change = { moved: Array.from({ length: of.size ** 2 }, () => [0, 0]), head: (of.size ** 2 - 1) / 2, ...change };
  }
  Object.assign(state, change);
  drawControls();
  redraw();
  clearTimeout(rest);
  rest = setTimeout(writeHash, 250);  // browsers count how often a page changes its address
}

function moveHead(head, to) {
  const limit = radius(), tap = tapsOf(state)[head];
  const held = to.map((offset, axis) => Math.min(limit, Math.max(-limit, offset)) - tap[axis]);
  update({ head, moved: state.moved.map((old, i) => i === head ? held.map(part => Number(part.toFixed(2))) : old) });
}

function writeHash() {
  const { size, dilation, alpha, weights, query, head, moved } = state;
  const parts = {
    kernel: KERNELS[state.kernel] ? state.kernel : weights.join(','), size, dilation, alpha, query: query.join(','),
    head: head + 1,
    moved: moved.flatMap((offset, i) => isMoved(i) ? [`${i + 1}:${offset}`] : []).join(';'),
  };
  history.replaceState(null, '', '#' + Object.entries(parts).map(part => part.join('=')).join('&'));
}

// Whatever is missing or wrong in the address is left as it was.
function readHash(address) {
  const hash = new URLSearchParams(new URL(address).hash.slice(1)), change = {};
  const numbers = text => text.split(',').map(part => part.trim() === '' ? NaN : Number(part));
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
  number('head', x => Number.isInteger(x) && x >= 1 && x <= size ** 2);
  if ('head' in change) change.head -= 1;
  change.moved = Array.from({ length: size ** 2 }, () => [0, 0]);
  for (const entry of moved.split(';')) {
    const [head, offset = ''] = entry.split(':'), by = numbers(offset);
    if (head - 1 in change.moved && by.length === 2 && by.every(x => Math.abs(x) <= 20)) change.moved[head - 1] = by;
  }
  update(change);
}

// From soft to sharp in four seconds, or at once for who wants no motion.
function play() {
  const calm = matchMedia('(prefers-reduced-motion: reduce)').matches, start = performance.now();
  cancelAnimationFrame(playing);
  const step = now => {
    const part = calm ? 1 : Math.min(1, Math.max(0, now - start) / 4000);
    update({ alpha: Number((0.1 * 460 ** part).toPrecision(3)) });
    if (part < 1) playing = requestAnimationFrame(step);
  };
  step(start);
}

function listen() {
  document.forms[0].addEventListener('submit', event => event.preventDefault());
  document.forms[0].addEventListener('change', ({ target: { name, value } }) =>
    update({ [name]: name === 'kernel' ? value : Number(value) }));
  find('#alpha').addEventListener('input', ({ target }) => {
    cancelAnimationFrame(playing);
    update({ alpha: Number((LEAST * (MOST / LEAST) ** (target.value / 300)).toPrecision(3)) });
  });
  find('#play').addEventListener('click', play);
  find('#back').addEventListener('click', () => update({ moved: state.moved.map(() => [0, 0]) }));
  find('#clear').addEventListener('click', () => update({ kernel: '', weights: state.weights.map(() => 0) }));
  find('#pen').addEventListener('input', ({ target: { value } }) => {
    find('output[for=pen]').textContent = minus(value);
  });

  // a pen draws weights, a keyboard types them
  const weights = find('#weights');
  const weigh = (cell, weight) => update({
    kernel: '', weights: state.weights.map((w, i) => i === Number(cell.dataset.tap) ? weight : w),
  });
  const pen = event => {
    if (!event.buttons) return;
    // a quick stroke skips no cell
    for (const { clientX, clientY } of [...event.getCoalescedEvents?.() ?? [], event]) {
      const cell = document.elementFromPoint(clientX, clientY), weight = Number(find('#pen').value);
      if (cell && cell.dataset.tap && state.weights[cell.dataset.tap] !== weight) weigh(cell, weight);
    }
  };
  weights.addEventListener('pointerdown', event => {
    if (event.target.hasPointerCapture(event.pointerId)) event.target.releasePointerCapture(event.pointerId);
    if (event.pointerType === 'mouse') requestAnimationFrame(() => event.target.select?.());
    else event.preventDefault();
    pen(event);
  });
  weights.addEventListener('pointermove', pen);
  weights.addEventListener('dragstart', event => event.preventDefault());  // of text that is selected
  weights.addEventListener('input', ({ target }) => {
    if (Math.abs(typed(target)) <= 100) weigh(target, typed(target));
  });
  weights.addEventListener('focusin', ({ target }) => target.select());
  weights.addEventListener('focusout', drawControls);

  for (const name of ['photo', 'convolution', 'attention', 'difference']) {
    const point = event => update({
      query: pointAt(event, stages[name].box).map((part, axis) => Math.floor(part * [photo.rows, photo.cols][axis])),
    });
    stages[name].box.addEventListener('pointermove', point);
    stages[name].box.addEventListener('pointerdown', point);
  }
  stages.photo.box.addEventListener('keydown', event => {
    const limits = [photo.rows, photo.cols], by = ARROWS[event.key];
    if (!by) return;
    event.preventDefault();
    update({ query: state.query.map((q, axis) => Math.min(limits[axis] - 1, Math.max(0, q + by[axis]))) });
  });

  const { box } = stages.heads;
  const at = event => pointAt(event, box).map(part => part * (2 * radius() + 1) - radius() - 0.5);
  let grip = null;  // how far the pointer took hold of a head from its middle
  box.addEventListener('pointerdown', event => {
    const place = at(event), centers = centersOf(state);
    const far = centers.map(center => Math.hypot(...center.map((offset, axis) => offset - place[axis])));
    const head = far.indexOf(Math.min(...far));
    box.setPointerCapture(event.pointerId);
    grip = centers[head].map((offset, axis) => offset - place[axis]);
    if (Math.hypot(...grip) > 1) grip = null;
    update({ head });
  });
  box.addEventListener('pointermove', event => {
    if (!grip || !event.buttons) return;
    const to = at(event).map((offset, axis) => offset + grip[axis]), tap = tapsOf(state)[state.head];
    moveHead(state.head, Math.hypot(to[0] - tap[0], to[1] - tap[1]) < 0.2 ? tap : to);
  });
  box.addEventListener('pointerup', () => { grip = null; });
  box.addEventListener('keydown', event => {
    const { head } = state, by = ARROWS[event.key], step = event.shiftKey ? 1 : 0.1;
    if (by) moveHead(head, centersOf(state)[head].map((offset, axis) => offset + by[axis] * step));
    else if (event.key === 'Escape') moveHead(head, tapsOf(state)[head]);
    else return;
    event.preventDefault();
  });
  addEventListener('hashchange', ({ newURL }) => readHash(newURL));
}

find('#kernels').append(...Object.entries(NAMES).map(([value, name]) => element('label', {},
  element('input', { type: 'radio', name: 'kernel', value }), element('span', {}, name))));
listen();
readHash(location.href);
const ready = new Promise(resolve => requestAnimationFrame(() => requestAnimationFrame(resolve)));
