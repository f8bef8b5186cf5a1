// What one net takes on the page: picture, classes, tiles.

class Panel {
  constructor(net, number) {
    this.net = net;
    this.number = number;
    this.section = document.getElementById('net-template').content.cloneNode(true).firstElementChild;
    this.find = selector => this.section.querySelector(selector);
    this.find('h2').append(...net.name.split('_').flatMap((word, i) => i ? ['_', element('wbr'), word] : [word]));
    this.find('.about p').textContent = net.caption;
    this.section.setAttribute('aria-label', net.name);
    this.section.style.setProperty('--film', `${net.cols + 2} / ${net.rows + 2}`);
    const atlas = (maps, layer) => new Atlas(maps, layer.shape, layer.middle, net.vector);
    this.atlases = net.layers.map(layer => atlas(layer.heads, layer));
    this.covers = net.layers.map(layer => atlas(1, layer));  // to lay over the picture
    this.tileScreen = new Screen(this.find('.layers > canvas'));
    this.pictureScreen = new Screen(this.find('.stage canvas'));
    this.tiles = [];
    this.layers = net.layers.map((layer, number) => this.makeLayer(layer, number));
    if (net.film) this.film = new Film(this); else this.find('.film').remove();
    for (const [name, most] of [['--many', 16], ['--few', 7]]) {  // tiles side by side, in rows of like length
      const heads = Math.max(...net.layers.map(layer => layer.heads)), rows = Math.ceil(heads / most);
      this.find('.layers').style.setProperty(name, Math.max(Math.ceil(heads / rows), name === '--many' ? 9 : 1));
    }
    const resized = new ResizeObserver(() => this.fit());
    resized.observe(this.find('.layers'));
    resized.observe(this.find('.stage'));

    const stage = this.find('.stage');
    stage.setAttribute('aria-label', `Picture for ${net.name}; the arrow keys move the query`);
    const point = event => update({ at: pointAt(event, stage) });
    stage.addEventListener('pointermove', point);
    stage.addEventListener('pointerdown', point);
    stage.addEventListener('keydown', event => {
      const move = ARROWS[event.key];
      if (!move) return;
      event.preventDefault();
      const to = (q, d, n) => (Math.min(n - 1, Math.max(0, q + d)) + 0.5) / n;
      update({ at: net.cell(net.query()).map((q, axis) => to(q, move[axis], net.grid[axis])) });
    });
  }

  makeLayer(layer, number) {
    const { name, heads, shape } = layer, row = element('div', { class: 'heads' }), distance = element('p');
    const group = element('div', { class: 'layer', role: 'group', 'aria-label': name },
      element('header', {}, element('h3', {}, name), distance), row);
    group.style.setProperty('--shape', `${shape[1]} / ${shape[0]}`);
    const first = this.tiles.length;
    for (let head = 0; head < heads; head++) {
      const label = `${name}, ${layer.weights ? 'weight map' : 'head'} ${head}`;
      const box = element('div'), button = element('button',
        { class: 'tile', type: 'button', 'aria-pressed': 'false', 'aria-label': label }, box, String(head));
      const index = this.tiles.push({ button, box, layer: number, head, label }) - 1;
      button.addEventListener('click', () => {
        const chosen = [...state.heads];
        chosen[this.number] = chosen[this.number] === index ? null : index;
        update({ heads: chosen });
      });
      button.addEventListener('keydown', event => {
        const next = { ArrowRight: 'nextElementSibling', ArrowLeft: 'previousElementSibling' }[event.key];
        if (next && button[next]) button[next].focus();
      });
      row.append(button);
    }
    this.find('.layers').append(group);
    return { layer, group, row, distance, tiles: this.tiles.slice(first) };
  }

  // The head that is laid over the picture, as long as its layer is on the screen.
  chosen() {
    const chosen = state.heads[this.number];
    return chosen !== null && this.net.visible(this.net.heads[chosen].layer) ? chosen : null;
  }

  // Where things lie on the screen, which a redraw must not wait for.
  fit() {
    this.tileScreen.fit();
    this.pictureScreen.fit();
    for (const tile of this.tiles) tile.place = this.tileScreen.place(tile.box);
    if (this.film) this.film.fit();
    redraw();
  }

  // What depends on the picture and the options, not on the query.
  drawOptions() {
    const { net } = this, mean = net.averages(), { top, label } = net.predictions[state.image];
    const rows = mean ? [] : label && !top.some(([name]) => name === label[0]) ? [...top, label] : top;
    this.find('img').src = mean ? net.average : net.pictures[state.image];
    this.find('.classes').hidden = mean;
    this.find('.classes').replaceChildren(...rows.map(([name, probability]) => {
      const bar = element('div'), known = probability !== null;
      if (known) bar.style.width = percent(probability).replace(' ', '');
      const marks = label && label[0] === name ? [element('small', { title: 'true class' }, 'true')] : [];
      return element('li', {}, element('span', {}, name, ...marks),
        ...known ? [element('span', {}, percent(probability)), element('div', {}, bar)] : []);
    }));
    this.tiles.forEach(({ button }, i) => button.setAttribute('aria-pressed', state.heads[this.number] === i));
  }

  // Which layers there are, and mean distances, which take all queries of a lattice.
  drawDistances() {
    const { net } = this, distances = net.vector || net.ofToken() ? null : net.meanDistances();
    const several = new Set(net.layers.map(({ shape }) => String(shape))).size > 1;
    for (const { layer, group, row, distance, tiles } of this.layers) {
      group.hidden = !net.visible(layer);
      if (group.hidden) continue;
      const of = tile => distances ? distances[this.tiles.indexOf(tile)] : tile.head;
      distance.textContent = [
        ...distances
          ? [`mean distance ${(tiles.reduce((sum, tile) => sum + of(tile), 0) / tiles.length).toFixed(1)} px`] : [],
        ...layer.weights ? [layer.queries.join(' × ')] : several ? [layer.shape.join(' × ')] : [],
      ].join(', ');
      if (distances) for (const tile of tiles) tile.button.title = `mean distance ${of(tile).toFixed(2)} px`;
      const order = [...tiles].sort((a, b) => state.sort ? of(a) - of(b) : a.head - b.head);
      if (order.some((tile, i) => row.children[i] !== tile.button)) {
        const focused = document.activeElement;
        row.append(...order.map(tile => tile.button));
        if (row.contains(focused)) focused.focus();
      }
      order.forEach((tile, i) => { tile.button.tabIndex = i ? -1 : 0; });  // one tab stop a layer
    }
    this.fit();
  }

  // The maps of the query, in parts of `most`, or of each tile's own largest; over the picture always of its own.
  drawQuery(most) {
    const { net, tileScreen, pictureScreen } = this, cell = net.cell(net.query());
    const { width, height } = pictureScreen.canvas, whole = [0, 0, width, height];
    const middle = ({ shape }) => shape.map(n => n >> 1);
    tileScreen.clear();
    net.layers.forEach((layer, number) => {
      if (!net.visible(layer)) return;
      this.atlases[number].fill(net.shown.subarray(layer.start, layer.end), most);
      for (const { place, head } of this.layers[number].tiles) {
        tileScreen.drawMap(this.atlases[number], head, place);
        const at = layer.weights ? middle(layer) : layer.cell(cell, net.grid);
        if (!layer.token) tileScreen.drawFrame(place, layer.shape, at, 0.75);
      }
    });

    const chosen = this.chosen();
    pictureScreen.clear();
    this.find('.stage').classList.toggle('covered', chosen !== null && !net.vector);
    if (chosen !== null) {
      const { layer } = net.heads[chosen], cover = this.covers[this.tiles[chosen].layer];
      cover.fill(net.head(chosen), 0, true);
      let place = whole;
      if (layer.weights) {  // around the query, in pixels of the layer's own grid
        const [h, w] = [height / layer.queries[0], width / layer.queries[1]], [row, col] = layer.cell(cell, net.grid);
        const [up, left] = middle(layer);
        place = [(col - left) * w, (row - up) * h, layer.shape[1] * w, layer.shape[0] * h];
      }
      pictureScreen.drawMap(cover, 0, place);
    }
    if (!net.ofToken()) pictureScreen.drawFrame(whole, net.grid, cell, 1.75);
    if (this.film) this.film.draw();
  }

  // In words, once the query is at rest: a screen reader would never finish otherwise.
  describe() {
    const { net } = this, query = net.query(), chosen = this.chosen(), [at, along] = net.cell(query);
    net.show(query);  // a frame may not have been drawn since
    let text = net.ofToken() ? 'Query: the class token.'
      : `Query: row ${at}, column ${along} of ${net.grid.join(' × ')}.`;
    if (net.averages()) text += ` Mean over ${data.images.length} pictures.`;
    if (chosen !== null) {
      const map = net.head(chosen), k = map.indexOf(map.reduce((a, b) => Math.max(a, b)));
      const { shape, token } = net.heads[chosen].layer, row = Math.floor(k / shape[1]), col = k % shape[1];
      const [up, left] = [row - (shape[0] >> 1), col - (shape[1] >> 1)].map(offset => minus(String(offset)));
      text += ` ${this.tiles[chosen].label}: ` + (net.vector
        ? `its largest weight is ${map[k].toFixed(2)}, ${up} rows and ${left} columns away.`
        : `${token ? '' : `mean distance ${net.distance(chosen, query).toFixed(1)} px, `}most at row ${row}, ` +
          `column ${col} of ${shape.join(' × ')} (${percent(map[k])}).`)
        + ' Over the picture its colours are scaled to its own largest value.';
    }
    this.find('output').textContent = text;
  }
}
