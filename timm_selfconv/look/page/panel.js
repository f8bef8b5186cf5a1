// @ts-check
// The net on the page: picture, classes, tiles, the film of its training.
import { ARROWS, Atlas, Screen, calm, choose, contextOf, element, find, minus, percent, pointAt } from './drawing.js';

/** @typedef {import('./maps.js').Net} Net */
/** @typedef {import('./maps.js').Layer} Layer */
/** @typedef {{ state: import('./maps.js').State, update: (change: Object<string, any>) => void,
 *              redraw: () => void }} Page */
/** @typedef {{ button: HTMLElement, box: HTMLElement, layer: number, head: number, label: string,
 *              place: import('./drawing.js').Place }} Tile */

const EPOCH = 400;  // milliseconds
const SHIFT = 0.5;  // share of a head's attention from which one offset makes it a shift of the picture

const signed = (/** @type {number} */ n) => n > 0 ? `+${n}` : minus(String(n));
const offsetText = (/** @type {number[]} */ [row, col]) => `${signed(row)},${signed(col)}`;

/** The heads of a layer that look at one fixed offset. @param {Layer} layer */
const shiftsOf = layer => layer.shifts.flatMap((shift, head) => shift[2] > SHIFT ? [{ head, shift }] : []);

/** A small grid of the offsets that a layer's shifts take, the query in its middle.
 * @param {Layer} layer @param {number} reach */
function tapGrid(layer, reach) {
  const side = 2 * reach + 1, shifts = shiftsOf(layer), canvas = element('canvas', {
    class: 'taps', width: side, height: side, role: 'img', title: 'Offsets from the query that its shift heads look at',
    'aria-label': `Offsets of its shift heads: ${shifts.map(({ shift }) => offsetText(shift)).join('; ') || 'none'}`,
  });
  const context = contextOf(canvas), hold = n => Math.min(reach, Math.max(-reach, n)) + reach;
  context.fillStyle = '#8884';
  context.fillRect(0, 0, side, side);
  context.fillRect(reach, reach, 1, 1);
  context.fillStyle = '#21788c';
  for (const { shift: [row, col] } of shifts) context.fillRect(hold(col), hold(row), 1, 1);
  return canvas;
}

/** Address of the theorem's page in this folder, with a kernel that is the shift of a head. @param {number[]} offset */
function theoremLink([row, col]) {
  const near = Math.max(Math.abs(row), Math.abs(col)) <= 2, size = near ? 5 : 3, middle = (size * size - 1) / 2;
  const head = near ? middle + 5 * row + col : middle;
  const kernel = Array.from({ length: size * size }, (_, i) => Number(i === head)).join(',');
  return `theorem.html#kernel=${kernel}&size=${size}&alpha=46&head=${head}` +
    (near ? '' : `&moved=${head}:${row},${col}`);
}

export class Panel {
  /** @param {any} spec data of the page @param {Net} net @param {Page} page */
  constructor(spec, net, page) {
    this.spec = spec;
    this.net = net;
    this.page = page;
    find('.net').hidden = false;
    find('h2').append(...spec.name.split('_').flatMap((word, i) => i ? ['_', element('wbr'), word] : [word]));
    find('.about p').textContent = spec.caption;
    const atlas = (maps, layer) => new Atlas(maps, layer.shape, layer.middle, net.vector);
    this.atlases = net.layers.map(layer => atlas(layer.heads, layer));
    this.covers = net.layers.map(layer => atlas(1, layer));  // to lay over the picture
    this.tileScreen = new Screen(find('.layers > canvas'));
    this.pictureScreen = new Screen(find('.stage canvas'));
    /** @type {Tile[]} */
    this.tiles = [];
    this.layers = net.layers.map((layer, index) => this.makeLayer(layer, index));
    /** @type {number | null} */
    this.hovered = null;  // the tile under the pointer
    /** @type {import('./drawing.js').Pair | null} */
    this.pointed = null;  // the place under the pointer, in parts of a map
    for (const [name, most] of /** @type {[string, number][]} */ ([['--many', 16], ['--few', 7]])) {
      const heads = Math.max(...net.layers.map(layer => layer.heads)), rows = Math.ceil(heads / most);
      const like = Math.max(Math.ceil(heads / rows), name === '--many' ? 9 : 1);  // rows of like length
      find('.layers').style.setProperty(name, String(like));
    }
    this.last = net.film ? net.film.epochs.length - 1 : 0;  // of the film
    this.playing = 0;
    this.makeSentence();
    this.makeFilm();
    const resized = new ResizeObserver(() => this.fit());
    resized.observe(find('.layers'));
    resized.observe(find('.stage'));
    this.listen();
  }

  listen() {
    const { net, page: { state, update } } = this, stage = find('.stage');
    choose(stage, {
      pinned: () => state.pin, pin: pin => update({ pin }), move: event => update({ at: pointAt(event, stage) }),
      hover: event => this.point(this.hovered, state.pin ? pointAt(event, stage) : null),
      step: by => update({ at: net.cell(net.query()).map((q, axis) =>
        (Math.min(net.grid[axis] - 1, Math.max(0, q + by[axis])) + 0.5) / net.grid[axis]) }),
    });
    stage.addEventListener('pointerleave', () => this.point(null, null));
  }

  /** @param {number | null} hovered @param {import('./drawing.js').Pair | null} pointed */
  point(hovered, pointed) {
    this.hovered = hovered;
    this.pointed = pointed;
    this.page.redraw();
  }

  /** @param {Layer} layer @param {number} number */
  makeLayer(layer, number) {
    const { name, heads, shape } = layer, row = element('div', { class: 'heads' }), distance = element('p');
    const most = Math.max(2, ...this.net.layers.flatMap(shiftsOf).map(
      ({ shift: [row, col] }) => Math.max(Math.abs(row), Math.abs(col))));
    const taps = layer.shifts.length ? [tapGrid(layer, Math.min(4, most))] : [];
    const group = element('div', { class: 'layer', role: 'group', 'aria-label': name },
      element('header', {}, element('div', {}, element('h3', {}, name), distance), ...taps), row);
    group.style.setProperty('--shape', `${shape[1]} / ${shape[0]}`);
    const first = this.tiles.length;
    for (let head = 0; head < heads; head++) this.makeTile(layer, number, head, row);
    find('.layers').append(group);
    return { layer, group, row, distance, tiles: this.tiles.slice(first) };
  }

  /** @param {Layer} layer @param {number} number @param {number} head @param {HTMLElement} row */
  makeTile(layer, number, head, row) {
    const { state, update } = this.page, shift = layer.shifts[head], isShift = Boolean(shift) && shift[2] > SHIFT;
    const label = `${layer.name}, ${layer.weights ? 'weight map' : 'head'} ${head}`;
    const box = element('div'), button = element('button', {
      class: isShift ? 'tile shift' : 'tile', type: 'button', 'aria-pressed': 'false',
      'aria-label': isShift ? `${label}, looks at ${offsetText(shift)}` : label,
    }, box, String(head), ...isShift ? [element('b', {}, ` ${offsetText(shift)}`)] : []);
    const index = this.tiles.push({ button, box, layer: number, head, label, place: [0, 0, 0, 0] }) - 1;
    button.addEventListener('click', () => update({ head: state.head === index ? null : index }));
    button.addEventListener('pointermove', event => {
      if (event.pointerType === 'mouse') this.point(index, pointAt(event, box));
    });
    button.addEventListener('pointerleave', () => this.point(null, null));
    button.addEventListener('keydown', event => {
      const next = { ArrowRight: 'nextElementSibling', ArrowLeft: 'previousElementSibling' }[event.key];
      if (next && button[next]) button[next].focus();
    });
    row.append(button);
  }

  /** Say how much of a convolution a net is. */
  makeSentence() {
    const { net } = this, layers = net.layers.filter(layer => layer.shifts.length && !layer.token);
    const heads = layers.reduce((sum, { heads }) => sum + heads, 0);
    const shifts = layers.flatMap(shiftsOf).length;
    find('.kernel').hidden = !heads;
    find('.kernel').textContent = `${shifts} of ${heads} heads give more than half of their attention to one fixed ` +
      'offset, as the taps of a convolution do' + (net.film ? `; before training ${net.sharp(0) || 'none'}.` : '.');
  }

  makeFilm() {
    const { net, page: { state, update } } = this, film = find('.film'), slider = film.querySelector('input');
    film.hidden = !net.film;
    if (!net.film) return;
    slider.max = this.last;
    const pause = () => {
      cancelAnimationFrame(this.playing);
      this.playing = 0;
    };
    const now = () => Math.min(state.epoch ?? this.last, this.last);
    const go = epoch => update({ epoch: epoch >= this.last ? null : epoch });
    const toggle = () => {  // starts again after the end; in whole epochs if less motion is preferred
      if (this.playing) {
        pause();
        return go(Math.round(now()));
      }
      const begin = now() < this.last ? now() : 0, start = performance.now();
      const step = time => {
        const epoch = Math.min(this.last, begin + Math.max(0, time - start) / EPOCH);
        this.playing = epoch < this.last ? requestAnimationFrame(step) : 0;
        go(calm() ? Math.floor(epoch) : epoch);
      };
      this.playing = requestAnimationFrame(step);
    };
    slider.addEventListener('input', () => {
      pause();
      go(Math.round(slider.value));
    });
    slider.addEventListener('keydown', event => {  // an epoch a key; the browser's own step is a fraction of one
      const by = ARROWS[event.key];
      if (by) {
        pause();
        go(Math.max(0, Math.round(now()) + (by[1] || -by[0])));
      } else if (event.key === ' ') toggle();
      else return;
      event.preventDefault();
    });
    film.querySelector('button').addEventListener('click', toggle);
  }

  drawFilm() {
    const { net, page: { state } } = this, film = find('.film');
    if (!net.film) return;
    const epoch = net.epoch() ?? this.last, shown = Math.round(epoch), { loss, top1, epochs } = net.film;
    const [now, end] = [shown, this.last].map(i => Number(epochs[i].toPrecision(3)));
    const last = net.epoch() === null && net.layers[0].shifts.length > 0;
    const sharp = last ? net.layers.flatMap(shiftsOf).length : net.sharp(epoch);
    const text = [shown ? `after epoch ${now} of ${end}` : `untrained, before ${end} epochs`,
      `heads at one pixel: ${sharp}`, ...loss[shown] === null ? [] : [`training loss ${loss[shown].toFixed(2)}`],
      ...top1[shown] === null ? [] : [`validation accuracy ${top1[shown].toFixed(1)} %`]].join(', ');
    const slider = film.querySelector('input');
    slider.value = epoch;
    slider.setAttribute('aria-valuetext', text);
    film.querySelector('p').textContent = text + (net.epoch() === null || state.epoch === null ? '' :
      '. The maps are Gaussians of each head’s mean and covariance.');
    film.querySelector('button').textContent = this.playing ? 'Pause' : 'Play';
  }

  /** The head that lies over the picture: the one under the pointer, else the chosen one, if its layer is shown. */
  chosen() {
    const chosen = this.hovered ?? this.page.state.head;
    return chosen !== null && this.net.visible(this.net.heads[chosen].layer) ? chosen : null;
  }

  /** Measure where things lie on the screen, which a redraw must not wait for. */
  fit() {
    this.tileScreen.fit();
    this.pictureScreen.fit();
    for (const tile of this.tiles) tile.place = this.tileScreen.place(tile.box);
    this.page.redraw();
  }

  /** Show the parts that depend on the picture and the options, not on the query. */
  drawOptions() {
    const { net, spec, page: { state } } = this, mean = net.averages();
    find('.stage img').src = mean ? spec.average : spec.pictures[state.image];
    find('.classes').hidden = mean;
    find('.classes').replaceChildren(...spec.predictions[state.image].map(([name, probability]) => {
      const bar = element('div');
      bar.style.width = percent(probability).replace(' ', '');
      return element('li', {}, element('span', {}, name), element('span', {}, percent(probability)),
        element('div', {}, bar));
    }));
    find('.stage').classList.toggle('pinned', state.pin);
    this.tiles.forEach(({ button }, i) => button.setAttribute('aria-pressed', String(state.head === i)));
  }

  /** Show the layers that apply, and mean distances, which take many queries. */
  drawDistances() {
    const { net, page: { state } } = this, distances = net.vector || net.ofToken() ? null : net.meanDistances();
    const several = new Set(net.layers.map(({ shape }) => String(shape))).size > 1;
    for (const { layer, group, row, distance, tiles } of this.layers) {
      group.hidden = !net.visible(layer);
      if (group.hidden) continue;
      const of = tile => distances ? distances[this.tiles.indexOf(tile)] : tile.head;
      distance.textContent = [
        ...distances
          ? [`mean distance ${(tiles.reduce((sum, tile) => sum + of(tile), 0) / tiles.length).toFixed(2)} px`] : [],
        ...layer.weights ? [layer.queries.join(' × ')] : several ? [layer.shape.join(' × ')] : [],
      ].join(', ');
      if (distances) for (const tile of tiles) tile.button.title = `mean distance ${of(tile).toFixed(2)} px`;
      const order = [...tiles].sort((a, b) => state.sort ? of(a) - of(b) : a.head - b.head);
      if (order.some((tile, i) => row.children[i] !== tile.button)) {
        const focused = /** @type {any} */ (document.activeElement);
        row.append(...order.map(tile => tile.button));
        if (row.contains(focused)) focused.focus();
      }
      order.forEach((tile, i) => { tile.button.tabIndex = i ? -1 : 0; });  // one tab stop a layer
    }
    this.fit();
  }

  /** Draw the maps of the query, in parts of `most`, or of each tile's own largest; over the picture always of its own.
   * @param {number} most */
  drawQuery(most) {
    const { net, tileScreen } = this, cell = net.cell(net.query());
    tileScreen.clear();
    net.layers.forEach((layer, number) => {
      if (!net.visible(layer)) return;
      this.atlases[number].fill(net.shown.subarray(layer.start, layer.end), most);
      for (const { place, head } of this.layers[number].tiles) {
        tileScreen.drawMap(this.atlases[number], head, place);
        const at = layer.weights ? this.middle(layer) : layer.cell(cell, net.grid);
        if (!layer.token) tileScreen.drawFrame(place, layer.shape, at, 0.75);
      }
    });
    this.drawPicture(cell);
    this.drawValue();
    this.drawFilm();
  }

  /** Give each tile a canvas of its own: on paper tiles lie elsewhere than on the screen. @param {boolean} on */
  print(on) {
    for (const { place, box } of this.tiles) {
      const [, , width, height] = place, own = element('canvas', { width, height });
      if (on && width) contextOf(own).drawImage(this.tileScreen.canvas, ...place, 0, 0, width, height);
      box.replaceChildren(...on ? [own] : []);
    }
  }

  /** @param {Layer} layer @returns {import('./drawing.js').Pair} */
  middle({ shape: [rows, cols] }) { return [rows >> 1, cols >> 1]; }

  /** @param {import('./drawing.js').Pair} cell */
  drawPicture(cell) {
    const { net, pictureScreen, page: { state } } = this, chosen = this.chosen(), { width, height } = pictureScreen.canvas;
    /** @type {import('./drawing.js').Place} */
    let place = [0, 0, width, height];
    pictureScreen.clear();
    find('.stage').classList.toggle('covered', chosen !== null && !net.vector);
    if (chosen !== null) {
      const { layer } = net.heads[chosen], cover = this.covers[this.tiles[chosen].layer];
      cover.fill(net.head(chosen), 0, true);
      if (layer.weights) {  // around the query, in pixels of the layer's own grid
        const [h, w] = [height / layer.queries[0], width / layer.queries[1]], [row, col] = layer.cell(cell, net.grid);
        const [up, left] = this.middle(layer);
        place = [(col - left) * w, (row - up) * h, layer.shape[1] * w, layer.shape[0] * h];
      }
      pictureScreen.drawMap(cover, 0, place);
    }
    if (!net.ofToken()) pictureScreen.drawFrame([0, 0, width, height], net.grid, cell, state.pin ? 3 : 1.75);
  }

  /** Print the attention of the shown head to the pixel under the pointer. */
  drawValue() {
    const { net, pointed } = this, chosen = this.chosen(), value = find('.value');
    if (chosen === null || !pointed || net.vector) {
      value.textContent = '';
      return;
    }
    const { shape } = net.heads[chosen].layer, [row, col] = pointed.map((part, axis) => Math.floor(part * shape[axis]));
    value.textContent =
      `${this.tiles[chosen].label}: ${percent(net.head(chosen)[row * shape[1] + col])} to row ${row}, column ${col}`;
  }

  /** Describe the view in words, once the query is at rest: a screen reader would never finish otherwise. */
  describe() {
    const { net, page: { state } } = this, query = net.query(), [at, along] = net.cell(query);
    const chosen = state.head, seen = chosen !== null && net.visible(net.heads[chosen].layer);
    if (!net.ready()) return;
    net.show(query);  // a frame may not have been drawn since
    let text = net.ofToken() ? 'Query: the class token.'
      : `Query: row ${at}, column ${along} of ${net.grid.join(' × ')}${state.pin ? ', pinned' : ''}.`;
    if (net.averages()) text += ` Mean over ${net.images} pictures.`;
    const link = find('.words a'), shift = seen ? net.heads[chosen].layer.shifts[net.heads[chosen].head] : null;
    link.hidden = !shift || shift[2] <= SHIFT || shift.slice(0, 2).some(n => Math.abs(n) > 20);
    if (shift && !link.hidden) link.href = theoremLink(shift);
    if (seen) {
      const map = net.head(chosen), k = map.indexOf(map.reduce((a, b) => Math.max(a, b)));
      const { shape, token } = net.heads[chosen].layer, row = Math.floor(k / shape[1]), col = k % shape[1];
      const [up, left] = [row - (shape[0] >> 1), col - (shape[1] >> 1)].map(offset => minus(String(offset)));
      text += ` ${this.tiles[chosen].label}: ` + (net.vector
        ? `its largest weight is ${map[k].toFixed(2)}, ${up} rows and ${left} columns away.`
        : `${token ? '' : `mean distance ${net.distance(chosen, query).toFixed(1)} px, `}most at row ${row}, ` +
          `column ${col} of ${shape.join(' × ')} (${percent(map[k])}).`)
        + ' Over the picture its colours are scaled to its own largest value.';
    }
    find('output').textContent = text;
  }
}
