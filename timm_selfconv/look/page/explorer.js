// @ts-check
// The explorer's page: its state, its controls, its address.
import { Atlas, element, find, largest, minus } from './drawing.js';
import { Net } from './maps.js';
import { paint } from './painter.js';
import { Panel } from './panel.js';

const data = JSON.parse(find('#data').textContent);

// the address stores this; the query is a point of the picture, as parts of its height and width
/** @type {import('./maps.js').State} */
const state = {
  image: 0, at: [0.5, 0.5], pin: false, view: 'all', scale: 'all', mean: false, sort: false, token: false,
  heads: data.nets.map(() => null), epoch: null,  // of the training; null is the last
};
const SWITCHES = ['mean', 'sort', 'token'];
/** @type {Panel[]} */
const panels = [];
/** @type {Map<boolean, HTMLElement[]>} */
const scales = new Map();
const { images } = data, page = { state, images, update, redraw };
let frame = 0, rest = 0;

function redraw() {
  if (!frame) frame = requestAnimationFrame(drawAll);
}

function drawAll() {
  frame = 0;
  if (panels.some(({ net }) => !net.ready())) return;  // drawn after unpacking
  for (const { net } of panels) net.show(net.query());
  for (const [signed, labels] of scales) {
    const alike = panels.filter(({ net }) => net.vector === signed);
    const most = state.scale === 'all' ? Math.max(...alike.map(({ net }) => largest(net.shown, net.middle))) : 0;
    for (const panel of alike) panel.drawQuery(most);
    const { middle } = alike[0].net, number = x => minus(String(Number(x.toPrecision(2))));
    const texts = signed
      ? most ? [middle - most, middle, middle + most].map(number) : ['less', number(middle), 'more']
      : most ? [0, most / 4, most].map(number) : ['0', '¼', 'each tile’s largest'];
    labels.forEach((label, i) => { label.textContent = texts[i]; });
  }
}

/** Draw now: a canvas that was fitted is blank until the next frame. */
function flush() {
  cancelAnimationFrame(frame);
  drawAll();
}

function drawOptions() {
  const { elements } = document.forms[0];
  for (const name of ['image', 'view', 'scale']) /** @type {any} */ (elements.namedItem(name)).value = String(state[name]);
  for (const name of SWITCHES) /** @type {any} */ (elements.namedItem(name)).checked = state[name];
  find('#pictures').classList.toggle('idle', panels.every(({ net }) => net.averages()));
  for (const panel of panels) panel.drawOptions();
}

/** Change the state, and show it once the maps that it needs are unpacked. @param {Object<string, any>} change */
function update(change) {
  Object.assign(state, change);
  const needs = panels.filter(({ net }) => !net.ready());
  if (needs.length) {
    say('Unpacking …');
    return Promise.all(needs.map(({ net }) => net.load())).then(() => {
      say('');
      refresh(change);
    });
  }
  refresh(change);
  return Promise.resolve();
}

/** @param {Object<string, any>} change */
function refresh(change) {
  if (['image', 'view', ...SWITCHES].some(name => name in change)) for (const panel of panels) panel.drawDistances();
  if (Object.keys(change).some(name => !['at', 'epoch'].includes(name))) drawOptions();
  redraw();
  clearTimeout(rest);
  rest = setTimeout(() => {
    for (const panel of panels) panel.describe();
    writeHash();  // browsers count how often a page changes its address
  }, 250);
}

function writeHash() {
  history.replaceState(null, '', '#' + new URLSearchParams(/** @type {any} */ ({
    image: state.image,
    at: state.at.map(part => part.toFixed(4)).join(','),
    pin: Number(state.pin),
    view: state.view,
    scale: state.scale,
    ...Object.fromEntries(SWITCHES.map(name => [name, Number(state[name])])),
    heads: state.heads.map((index, net) => {
      if (index === null) return '-';
      const { layer, head } = panels[net].tiles[index];
      return `${layer}.${head + 1}`;
    }).join(','),
    ...state.epoch === null ? {} : { epoch: Math.round(state.epoch) },
  })));
}

/** Read the address, ignoring missing and wrong values. */
function readHash() {
  const hash = new URLSearchParams(location.hash.slice(1)), change = /** @type {any} */ ({ ...state });
  const image = Number(hash.get('image') || NaN), at = (hash.get('at') || '').split(',').map(Number);
  if (image in images) change.image = image;
  if (at.length === 2 && at.every(part => part >= 0 && part < 1)) change.at = at;
  if (panels.some(({ net }) => net.views.includes(hash.get('view') || ''))) change.view = hash.get('view');
  if (['all', 'tile'].includes(hash.get('scale') || '')) change.scale = hash.get('scale');
  for (const name of ['pin', ...SWITCHES]) if (hash.has(name)) change[name] = hash.get(name) === '1';
  const epoch = hash.get('epoch') || '', last = Math.max(...panels.map(({ net }) => net.film ? net.film.loss.length - 1 : 0));
  if (/^\d+$/.test(epoch) && Number(epoch) < last) change.epoch = Number(epoch);
  if (hash.has('heads')) {
    const words = (hash.get('heads') || '').split(',');
    change.heads = panels.map(({ tiles }, net) => {
      const index = tiles.findIndex(({ layer, head }) => words[net] === `${layer}.${head + 1}`);
      return index < 0 ? null : index;
    });
  }
  return update(change);
}

/** Copy the address; of a page that is a file only the view, as its address is one on this device. @param {any} event */
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
  const nets = panels.map(({ net }) => net);
  const views = { all: 'all terms', position: 'position only', content: 'content only' };
  find('#mode').textContent = [
    nets.some(net => net.averages()) ? `mean over ${images.length} pictures` : images[state.image],
    ...nets.some(net => net.views.length > 1) ? [views[state.view]] : [],
    state.scale === 'all' ? 'shared scale' : 'per-tile scale',
    ...nets.some(net => net.ofToken()) ? ['class token'] : [],
    ...state.sort && nets.some(net => !net.vector && !net.ofToken()) ? ['heads sorted by distance'] : [],
  ].join(', ');
}

/** Title, scale and nets as they are on the screen, without their controls. */
function paintView() {
  const view = find('#view');
  flush();
  describeMode();
  for (const panel of panels) panel.describe();
  view.classList.add('still');
  const picture = paint(view);
  view.classList.remove('still');
  return picture;
}

/** @param {boolean} signed */
function makeScale(signed) {
  const atlas = new Atlas(1, [1, 256], signed ? 0.5 : 0, signed), labels = [0, 1, 2].map(() => element('span'));
  atlas.fill(Float32Array.from({ length: 256 }, (_, i) => signed ? i / 255 : (i / 255) ** 2));
  Object.assign(atlas.canvas, { role: 'img', ariaLabel: signed ? 'Scale of weights' : 'Scale of attention' });
  find('#scales').append(element('div', { class: 'scale' },
    element('b', {}, signed ? 'weight' : 'attention, square-root scale'), atlas.canvas, ...labels));
  scales.set(signed, labels);
}

function makeControls() {
  const [form] = document.forms, nets = panels.map(({ net }) => net);
  images.forEach((name, i) => find('#pictures').append(element('label', { title: name },
    element('input', { type: 'radio', name: 'image', value: i, 'aria-label': name }),
    element('img', { src: data.nets[0].pictures[i], alt: '' }))));
  find('#choose').hidden = images.length < 2;
  for (const part of ['.options', '#tools']) find(part).hidden = false;
  find('#views').hidden = !nets.some(net => net.views.length > 1);
  for (const input of find('#views').querySelectorAll('input')) {
    input.parentNode.hidden = !nets.some(net => net.views.includes(input.value));
  }
  const switches = {
    mean: images.length > 1 && nets.some(net => net.content), sort: nets.some(net => !net.vector),
    token: nets.some(net => net.token),
  };
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
    if (event.key === 'Escape') update(state.pin ? { pin: false } : { heads: panels.map(() => null) });
  });
  addEventListener('hashchange', readHash);
  for (const [type, on] of [['beforeprint', true], ['afterprint', false]]) {
    addEventListener(String(type), () => {
      flush();
      describeMode();
      for (const panel of panels) panel.print(Boolean(on));
    });
  }
  for (const signed of new Set(nets.map(net => net.vector))) makeScale(signed);
  makeNotes();
}

function makeNotes() {
  const nets = panels.map(({ net }) => net), notes = ["Distances are in pixels of a layer's grid. "
    + 'Heads are numbered from 1; commands, figures and Python count from 0.'];
  if (scales.has(false)) notes.push('Colours of attention follow its square root, which makes small shares visible.');
  if (nets.some(net => net.views.length > 1)) {
    notes.push('Position only: the softmax of the terms of equation (8) that depend on offsets (content-position, position).'
      + ' Content only: of the terms without offsets (content, key bias).');
  }
  if (nets.some(net => net.layers.some(layer => layer.shifts.length))) {
    notes.push('A number such as −1,+2 below a tile: the head gives more than half of its attention to the pixel one row '
      + 'up and two columns right, wherever the query is.');
  }
  for (const { net, spec: { name } } of panels) {
    if (net.token) {
      notes.push(`${name}: maps of patches leave the class token out and are scaled to sum to 1. So are `
        + 'the maps of the class token.');
    }
    if (net.vector) {
      notes.push(`${name} weighs the ${net.layers[0].shape.join(' × ')} pixels around the query, each weight map for a ` +
        'share of its channels.');
    } else if (!net.content) notes.push(`${name} attends by position only, the same in every picture.`);
    if (net.layers.some(layer => layer.texts.length && !layer.weights)) {
      notes.push(`${name}: maps are exact to a hundredth of their largest probability.`);
    }
  }
  find('#notes').textContent = notes.join(' ');
}

async function start() {
  say('Unpacking …');
  for (const [number, spec] of data.nets.entries()) {
    const net = new Net(spec, state, images.length);
    await net.load();
    panels.push(new Panel(spec, net, number, page));
  }
  makeControls();
  find('main').append(...panels.map(({ section }) => section));
  say('');
  await readHash();
}

const ready = start().catch(error => {
  say(`This page could not be drawn: ${error.message}`);
  throw error;
});

// for the console, and for tests
Object.assign(globalThis, { state, panels, ready, paint: paintView });
