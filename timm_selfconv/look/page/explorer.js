// @ts-check
// The explorer's page: its state, its controls, its address.
import { Atlas, element, find, largest, minus } from './drawing.js';
import { Net } from './maps.js';
import { paint } from './painter.js';
import { Panel } from './panel.js';

const data = JSON.parse(find('#data').textContent), { images } = data;

// the address stores this; the query is a point of the picture, as parts of its height and width
/** @type {import('./maps.js').State} */
const state = {
  image: 0, at: [0.5, 0.5], pin: false, scale: 'all', mean: false, sort: false, token: false, head: null,
  epoch: null,  // of the training; null is the last
};
const SWITCHES = ['mean', 'sort', 'token'];
const net = new Net(data, state);
/** @type {Panel} */
let panel;
/** @type {HTMLElement[]} */
const labels = [0, 1, 2].map(() => element('span'));  // of the scale
let frame = 0, rest = 0;

function redraw() {
  if (!frame) frame = requestAnimationFrame(drawAll);
}

function drawAll() {
  frame = 0;
  if (!net.ready()) return;  // drawn after unpacking
  net.show(net.query());
  const { middle, vector } = net, most = state.scale === 'all' ? largest(net.shown, middle) : 0;
  const number = x => minus(String(Number(x.toPrecision(2))));
  panel.drawQuery(most);
  const texts = vector
    ? most ? [middle - most, middle, middle + most].map(number) : ['less', number(middle), 'more']
    : most ? [0, most / 4, most].map(number) : ['0', '¼', 'each tile’s largest'];
  labels.forEach((label, i) => { label.textContent = texts[i]; });
}

/** Draw now: a canvas that was fitted is blank until the next frame. */
function flush() {
  cancelAnimationFrame(frame);
  drawAll();
}

function drawOptions() {
  const { elements } = document.forms[0];
  for (const name of ['image', 'scale']) /** @type {any} */ (elements.namedItem(name)).value = String(state[name]);
  for (const name of SWITCHES) /** @type {any} */ (elements.namedItem(name)).checked = state[name];
  find('#pictures').classList.toggle('idle', net.averages());
  panel.drawOptions();
}

/** Change the state, and show it once the maps that it needs are unpacked. @param {Object<string, any>} change */
async function update(change) {
  Object.assign(state, change);
  if (!net.ready()) {
    say('Unpacking …');
    await net.load();
    say('');
  }
  if (['image', ...SWITCHES].some(name => name in change)) panel.drawDistances();
  if (Object.keys(change).some(name => !['at', 'epoch'].includes(name))) drawOptions();
  redraw();
  clearTimeout(rest);
  rest = setTimeout(() => {
    panel.describe();
    writeHash();  // browsers count how often a page changes its address
  }, 250);
}

function writeHash() {
  const { image, at, pin, scale, head, epoch } = state, tile = head === null ? null : panel.tiles[head];
  history.replaceState(null, '', '#' + new URLSearchParams(/** @type {any} */ ({
    image,
    at: at.map(part => part.toFixed(4)).join(','),
    pin: Number(pin),
    scale,
    ...Object.fromEntries(SWITCHES.map(name => [name, Number(state[name])])),
    ...tile ? { head: `${tile.layer}.${tile.head}` } : {},
    ...epoch === null ? {} : { epoch: Math.round(epoch) },
  })));
}

/** Read the address, ignoring missing and wrong values. */
function readHash() {
  const hash = new URLSearchParams(location.hash.slice(1)), change = /** @type {any} */ ({ ...state });
  const image = Number(hash.get('image') || NaN), at = (hash.get('at') || '').split(',').map(Number);
  if (image in images) change.image = image;
  if (at.length === 2 && at.every(part => part >= 0 && part < 1)) change.at = at;
  if (['all', 'tile'].includes(hash.get('scale') || '')) change.scale = hash.get('scale');
  for (const name of ['pin', ...SWITCHES]) if (hash.has(name)) change[name] = hash.get(name) === '1';
  const epoch = hash.get('epoch') || '', last = net.film ? net.film.epochs.length - 1 : 0;
  if (/^\d+$/.test(epoch) && Number(epoch) < last) change.epoch = Number(epoch);
  const index = panel.tiles.findIndex(({ layer, head }) => hash.get('head') === `${layer}.${head}`);
  change.head = index < 0 ? null : index;
  return update(change);
}

/** Copy the address. A file has an address on this device only, so of a file copy the view.
 * @param {any} event */
async function copyLink({ target }) {
  writeHash();
  const file = location.protocol === 'file:', text = file ? location.hash : location.href;
  try {
    await navigator.clipboard.writeText(text);
    target.textContent = 'Copied';
    setTimeout(() => { target.textContent = 'Copy link'; }, 1500);
    if (file) {
      say('This page is a file on your device, so only the view was copied (#image=…). Send the file too, and append the '
        + 'view to its address.');
    }
  } catch {  // browsers keep the clipboard from some pages
    prompt(file ? 'This view, to append to the address of the page' : 'The link to this view', text);
  }
}

/** @param {string} text */
function say(text) {
  find('#status').hidden = !text;
  find('#status').textContent = text;
}

/** Say the choices in words, for a picture of the page. */
function describeMode() {
  find('#mode').textContent = [
    net.averages() ? `mean over ${images.length} pictures` : images[state.image],
    state.scale === 'all' ? 'shared scale' : 'per-tile scale',
    ...net.ofToken() ? ['class token'] : [],
    ...state.sort && !net.vector && !net.ofToken() ? ['heads sorted by distance'] : [],
  ].join(', ');
}

/** Title, scale and net as they are on the screen, without their controls. */
function paintView() {
  const view = find('#view');
  flush();
  describeMode();
  panel.describe();
  view.classList.add('still');
  const picture = paint(view);
  view.classList.remove('still');
  return picture;
}

function makeScale() {
  const signed = net.vector, atlas = new Atlas(1, [1, 256], signed ? 0.5 : 0, signed);
  atlas.fill(Float32Array.from({ length: 256 }, (_, i) => signed ? i / 255 : (i / 255) ** 2));
  Object.assign(atlas.canvas, { role: 'img', ariaLabel: signed ? 'Scale of weights' : 'Scale of attention' });
  find('.scale').append(element('b', {}, signed ? 'weight' : 'attention, square-root scale'), atlas.canvas, ...labels);
}

function makeControls() {
  const [form] = document.forms;
  images.forEach((name, i) => find('#pictures').append(element('label', { title: name },
    element('input', { type: 'radio', name: 'image', value: i, 'aria-label': name }),
    element('img', { src: data.pictures[i], alt: '' }))));
  find('#choose').hidden = images.length < 2;
  for (const part of ['.options', '#tools']) find(part).hidden = false;
  const switches = { mean: images.length > 1 && net.content, sort: !net.vector, token: net.token };
  for (const name in switches) {
    /** @type {any} */ (form.elements.namedItem(name)).closest('label').hidden = !switches[name];
  }
  find('.switches').hidden = !Object.values(switches).includes(true);
  form.addEventListener('submit', event => event.preventDefault());
  form.addEventListener('change', (/** @type {any} */ { target: { name, value, checked, type } }) => update({
    [name]: type === 'checkbox' ? checked : name === 'image' ? Number(value) : value,
  }));
  find('#link').addEventListener('click', copyLink);
  find('#save').addEventListener('click', () =>
    element('a', { href: paintView().toDataURL('image/png'), download: 'attention.png' }).click());
  addEventListener('keydown', event => {  // the pinned query first, then the head over the picture
    if (event.key === 'Escape') update(state.pin ? { pin: false } : { head: null });
  });
  addEventListener('hashchange', readHash);
  for (const [type, on] of [['beforeprint', true], ['afterprint', false]]) {
    addEventListener(String(type), () => {
      flush();
      describeMode();
      panel.print(Boolean(on));
    });
  }
  makeScale();
  makeNotes();
}

function makeNotes() {
  const notes = ["Distances are in pixels of a layer's grid."];
  if (net.vector) {
    notes.push(`The net weighs the ${net.layers[0].shape.join(' × ')} pixels around the query, each weight map for a share `
      + 'of its channels.');
  } else {
    notes.push('Colours of attention follow its square root, which makes small shares visible.');
    if (!net.content) notes.push('The net attends by position only, the same in every picture.');
  }
  if (net.layers.some(layer => layer.shifts.length)) {
    notes.push('A number such as −1,+2 below a tile: the head gives more than half of its attention to the pixel one row '
      + 'up and two columns right, wherever the query is.');
  }
  if (net.token) {
    notes.push('Maps of patches leave the class token out and are scaled to sum to 1. So are the maps of the class token.');
  }
  if (net.layers.some(layer => layer.texts.length && !layer.weights)) {
    notes.push('Maps are exact to a hundredth of their largest probability.');
  }
  find('#notes').textContent = notes.join(' ');
}

async function start() {
  say('Unpacking …');
  await net.load();
  panel = new Panel(data, net, { state, update, redraw });
  Object.assign(globalThis, { panel });
  makeControls();
  say('');
  await readHash();
}

const ready = start().catch(error => {
  say(`This page could not be drawn: ${error.message}`);
  throw error;
});

// for the console, and for tests
Object.assign(globalThis, { state, net, ready, paint: paintView });
