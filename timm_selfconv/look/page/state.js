// What the page shows: the state, its controls, its address.

const data = JSON.parse(document.getElementById('data').textContent);

// what the permalink holds: the query is a point of the picture, as parts of its height and width, for nets of any grid
const state = {
  image: 0, at: [0.5, 0.5], view: 'all', scale: 'all', mean: false, sort: false, token: false,
  heads: data.nets.map(() => null), epoch: null,  // of the films; without one the last
};

const SWITCHES = ['mean', 'sort', 'token'];
const panels = [], scales = new Map();
let frame = 0, rest = 0;

function redraw() {
  if (!frame) frame = requestAnimationFrame(drawAll);
}

function drawAll() {
  frame = 0;
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

function drawOptions() {
  const { elements } = document.forms[0];
  for (const name of ['image', 'view', 'scale']) elements[name].value = state[name];
  for (const name of SWITCHES) elements[name].checked = state[name];
  document.getElementById('pictures').classList.toggle('idle', panels.every(({ net }) => net.averages()));
  for (const panel of panels) panel.drawOptions();
}

function update(change) {
  Object.assign(state, change);
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
  history.replaceState(null, '', '#' + new URLSearchParams({
    image: state.image,
    at: state.at.map(part => part.toFixed(4)).join(','),
    view: state.view,
    scale: state.scale,
    ...Object.fromEntries(SWITCHES.map(name => [name, Number(state[name])])),
    heads: state.heads.map((index, net) => {
      if (index === null) return '-';
      const { layer, head } = panels[net].tiles[index];
      return `${layer}.${head}`;
    }).join(','),
    ...state.epoch === null ? {} : { epoch: Math.round(state.epoch) },
  }));
}

// Whatever is missing or wrong in the address is left as it was.
function readHash() {
  const hash = new URLSearchParams(location.hash.slice(1)), change = { ...state };
  const image = Number(hash.get('image') || NaN), at = (hash.get('at') || '').split(',').map(Number);
  if (image in data.images) change.image = image;
  if (at.length === 2 && at.every(part => part >= 0 && part < 1)) change.at = at;
  if (panels.some(({ net }) => net.views.includes(hash.get('view')))) change.view = hash.get('view');
  if (['all', 'tile'].includes(hash.get('scale'))) change.scale = hash.get('scale');
  for (const name of SWITCHES) if (hash.has(name)) change[name] = hash.get(name) === '1';
  if (/^\d+$/.test(hash.get('epoch')) && panels.some(({ film }) => film)) change.epoch = Number(hash.get('epoch'));
  if (hash.has('heads')) {
    const words = hash.get('heads').split(',');
    change.heads = panels.map(({ tiles }, net) => {
      const index = tiles.findIndex(({ layer, head }) => words[net] === `${layer}.${head}`);
      return index < 0 ? null : index;
    });
  }
  update(change);
}

// Of a page that is a file only the view can be shared: its address is one on this device.
async function copyLink({ target }) {
  writeHash();
  const file = location.protocol === 'file:', text = file ? location.hash : location.href;
  try {
    await navigator.clipboard.writeText(text);
    target.textContent = 'Copied';
    setTimeout(() => { target.textContent = 'Copy link'; }, 1500);
    if (file) {
      say('This page is a file on your device, so only the view was copied (#image=…): send the file too, and put the '
        + 'view behind its address, or behind that of the page once it is on the web.');
    }
  } catch {  // browsers keep the clipboard from some pages
    prompt(file ? 'This view, to be put behind the address of the page' : 'The link to this view', text);
  }
}

function say(text) {
  const status = document.getElementById('status');
  status.hidden = !text;
  status.textContent = text;
}

// The choices in words, for a picture of the page.
function describeMode() {
  const nets = panels.map(({ net }) => net);
  const views = { all: 'all terms', position: 'position only', content: 'content only' };
  document.getElementById('mode').textContent = [
    nets.some(net => net.averages()) ? `mean over ${data.images.length} pictures` : data.images[state.image],
    ...nets.some(net => net.views.length > 1) ? [views[state.view]] : [],
    state.scale === 'all' ? 'shared scale' : 'per-tile scale',
    ...nets.some(net => net.ofToken()) ? ['class token'] : [],
    ...state.sort && nets.some(net => !net.vector && !net.ofToken()) ? ['heads sorted by distance'] : [],
  ].join(', ');
}

// Title, scale and nets as they are on the screen: pictures, backgrounds and lines of text, each where it is.
function paint() {
  const view = document.getElementById('view'), ratio = Math.max(2, devicePixelRatio);
  if (frame) {  // until which a canvas that was fitted is blank
    cancelAnimationFrame(frame);
    drawAll();
  }
  describeMode();
  for (const panel of panels) panel.describe();
  view.classList.add('still');
  const { left, top, width, height } = view.getBoundingClientRect();
  const margin = 16, sides = [width, height].map(side => Math.ceil((side + 2 * margin) * ratio));
  const canvas = element('canvas', { width: sides[0], height: sides[1] });
  const context = canvas.getContext('2d');
  context.scale(ratio, ratio);
  context.fillStyle = getComputedStyle(document.body).backgroundColor;
  context.fillRect(0, 0, width + 2 * margin, height + 2 * margin);
  context.translate(margin - left, margin - top);
  context.imageSmoothingEnabled = false;
  context.textBaseline = 'middle';
  for (const node of view.querySelectorAll('*')) {
    const box = node.getBoundingClientRect(), style = getComputedStyle(node);
    if (!box.width) continue;
    context.fillStyle = style.backgroundColor;
    context.fillRect(box.left, box.top, box.width, box.height);
    context.filter = style.filter;
    if (node.matches('img, canvas')) context.drawImage(node, box.left, box.top, box.width, box.height);
    context.filter = 'none';
    context.fillStyle = style.color;
    context.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
    if (node.matches('[aria-pressed=true]')) {
      context.strokeRect(box.left - 2, box.top - 2, box.width + 4, box.height + 4);
    }
    for (const text of node.childNodes) {
      if (text.nodeType !== Node.TEXT_NODE) continue;
      let line = '', last = null;
      const range = document.createRange(), flush = () => {
        if (last) context.fillText(line, last.left, (last.top + last.bottom) / 2);
      };
      for (let i = 0; i < text.length; i++) {  // a line ends where the next character lies lower
        range.setStart(text, i);
        range.setEnd(text, i + 1);
        const place = range.getBoundingClientRect();
        if (!place.width && !text.data[i].trim()) continue;  // space that the page folds
        if (!last || place.top > last.top + 2) {
          flush();
          [line, last] = ['', place];
        }
        line += text.data[i];
      }
      flush();
    }
  }
  view.classList.remove('still');
  return canvas;
}

function savePng() {
  const link = element('a', { href: paint().toDataURL('image/png'), download: 'attention.png' });
  link.click();
}

function makeScale(signed) {
  const atlas = new Atlas(1, [1, 256], signed ? 0.5 : 0, signed), labels = [0, 1, 2].map(() => element('span'));
  atlas.fill(Float32Array.from({ length: 256 }, (_, i) => signed ? i / 255 : (i / 255) ** 2));
  Object.assign(atlas.canvas, { role: 'img', ariaLabel: signed ? 'Scale of weights' : 'Scale of attention' });
  document.getElementById('scales').append(element('div', { class: 'scale' },
    element('b', {}, signed ? 'weight' : 'attention, square-root scale'), atlas.canvas, ...labels));
  scales.set(signed, labels);
}

function makeControls() {
  const [form] = document.forms;
  data.images.forEach((name, i) => document.getElementById('pictures').append(element('label', { title: name },
    element('input', { type: 'radio', name: 'image', value: i, 'aria-label': name }),
    element('img', { src: data.nets[0].pictures[i], alt: '' }))));
  const nets = panels.map(({ net }) => net);
  document.getElementById('choose').hidden = data.images.length < 2;
  document.getElementById('views').hidden = !nets.some(net => net.views.length > 1);
  const switches = {
    mean: data.images.length > 1 && nets.some(net => net.content), sort: nets.some(net => !net.vector),
    token: nets.some(net => net.token),
  };
  for (const name in switches) form.elements[name].closest('label').hidden = !switches[name];
  form.querySelector('.switches').hidden = !Object.values(switches).includes(true);
  form.addEventListener('submit', event => event.preventDefault());
  form.addEventListener('change', ({ target: { name, value, checked, type } }) => update({
    [name]: type === 'checkbox' ? checked : name === 'image' ? Number(value) : value,
  }));
  document.getElementById('link').addEventListener('click', copyLink);
  document.getElementById('save').addEventListener('click', savePng);
  addEventListener('keydown', event => {
    if (event.key === 'Escape') update({ heads: panels.map(() => null) });
  });
  addEventListener('hashchange', readHash);
  for (const signed of new Set(nets.map(net => net.vector))) makeScale(signed);

  const notes = ["Distances are in pixels of a layer's grid."];
  if (scales.has(false)) notes.push('Colours of attention follow its square root, so that small shares show too.');
  if (nets.some(net => net.views.length > 1)) {
    notes.push('Position only: the softmax of the terms of equation (8) that know offsets (content-position, position).'
      + ' Content only: of those that look at keys (content, key bias).');
  }
  for (const net of nets) {
    notes.push(net.vector
      ? `${net.name} weighs the ${net.layers[0].shape.join(' × ')} pixels around the query, each weight map for a ` +
        'share of its channels.'
      : (net.content ? '' : `${net.name} attends by position only, the same in every picture. `)
        + (net.levels ? `${net.name}: maps are exact to 1/${net.levels} of their largest probability.` : ''));
  }
  document.getElementById('notes').textContent = notes.join(' ');
}

async function start() {
  for (const [number, spec] of data.nets.entries()) {
    const net = new Net(spec);
    await net.load();
    panels.push(new Panel(net, number));
  }
  makeControls();
  document.querySelector('main').append(...panels.map(({ section }) => section));
  say('');
  readHash();
}

const ready = start().catch(error => {
  say(`This page could not be drawn: ${error.message}`);
  throw error;
});
