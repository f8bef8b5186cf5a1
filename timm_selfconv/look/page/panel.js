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
    this.section.style.setProperty('--shape', `${net.shape[1]} / ${net.shape[0]}`);
    this.section.style.setProperty('--film', `${net.cols + 2} / ${net.rows + 2}`);
    const signed = Boolean(net.footprints);
    this.atlas = new Atlas(net.total, net.shape, net.middle, signed);
    this.chosenAtlas = new Atlas(1, net.shape, net.middle, signed);
    this.tileScreen = new Screen(this.find('.layers > canvas'));
    this.pictureScreen = new Screen(this.find('.stage canvas'));
    this.tiles = [];
    this.layers = net.heads.map((heads, layer) => this.makeLayer(heads, layer));
    if (net.film) this.film = new Film(this); else this.find('.film').remove();
    for (const [name, most] of [['--many', 16], ['--few', 7]]) {  // tiles side by side, in rows of like length
      const heads = Math.max(...net.heads), rows = Math.ceil(heads / most);
      this.find('.layers').style.setProperty(name, Math.max(Math.ceil(heads / rows), name === '--many' ? 9 : 1));
    }
    const resized = new ResizeObserver(() => this.fit());
    resized.observe(this.find('.layers'));
    resized.observe(this.find('.stage'));

    const stage = this.find('.stage');
    stage.setAttribute('aria-label', `Picture for ${net.name}; the arrow keys move the query`);
    const point = event => {
      const box = stage.getBoundingClientRect(), part = x => Math.min(0.9999, Math.max(0, x));
      update({ at: [part((event.clientY - box.top) / box.height), part((event.clientX - box.left) / box.width)] });
    };
    stage.addEventListener('pointermove', point);
    stage.addEventListener('pointerdown', point);
    stage.addEventListener('keydown', event => {
      const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!move) return;
      event.preventDefault();
      const query = net.query(), to = (q, d, n) => (Math.min(n - 1, Math.max(0, q + d)) + 0.5) / n;
      update({
        at: [to(Math.floor(query / net.cols), move[0], net.rows), to(query % net.cols, move[1], net.cols)],
      });
    });
  }

  makeLayer(heads, layer) {
    const { net } = this, row = element('div', { class: 'heads' }), distance = element('p'), name = net.layers[layer];
    const group = element('div', { class: 'layer', role: 'group', 'aria-label': name },
      element('header', {}, element('h3', {}, name), distance), row);
    const first = this.tiles.length;
    for (let head = 0; head < heads; head++) {
      const label = `${name}, ${net.footprints ? 'weight map' : 'head'} ${head}`;
      const box = element('div'), button = element('button',
        { class: 'tile', type: 'button', 'aria-pressed': 'false', 'aria-label': label }, box, String(head));
      const index = this.tiles.push({ button, box, layer, head, label }) - 1;
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
    return { row, distance, tiles: this.tiles.slice(first) };
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
        element('span', {}, known ? percent(probability) : ''), element('div', {}, bar));
    }));
    this.tiles.forEach(({ button }, i) => button.setAttribute('aria-pressed', state.heads[this.number] === i));
  }

  // Mean distances take all queries of a lattice: they wait until the options are at rest.
  drawDistances() {
    const { net } = this, distances = net.footprints ? null : net.meanDistances();
    for (const [layer, { row, distance, tiles }] of this.layers.entries()) {
      const of = tile => distances ? distances[this.tiles.indexOf(tile)] : tile.head;
      distance.textContent = distances
        ? `mean distance ${(tiles.reduce((sum, tile) => sum + of(tile), 0) / tiles.length).toFixed(1)} px`
        : `${net.footprints[this.tiles.indexOf(tiles[0])].grid.join(' × ')}`;
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
    const { net, tileScreen, pictureScreen } = this, query = net.query();
    const cell = [Math.floor(query / net.cols), query % net.cols];
    const middle = net.shape.map(n => n >> 1), { width, height } = pictureScreen.canvas, whole = [0, 0, width, height];
    this.atlas.fill(net.shown, most);
    tileScreen.clear();
    this.tiles.forEach(({ place }, i) => {
      tileScreen.drawMap(this.atlas, i, place);
      tileScreen.drawFrame(place, net.shape, net.footprints ? middle : cell, 0.75);
    });

    const chosen = state.heads[this.number];
    pictureScreen.clear();
    this.find('.stage').classList.toggle('covered', chosen !== null && !net.footprints);
    if (chosen !== null) {
      this.chosenAtlas.fill(net.head(chosen), 0, true);
      let place = whole;
      if (net.footprints) {  // around the query, in pixels of the layer's own grid
        const { grid: [rows, cols] } = net.footprints[chosen], [h, w] = [height / rows, width / cols];
        const row = Math.floor(cell[0] * rows / net.rows), col = Math.floor(cell[1] * cols / net.cols);
        place = [(col - middle[1]) * w, (row - middle[0]) * h, net.shape[1] * w, net.shape[0] * h];
      }
      pictureScreen.drawMap(this.chosenAtlas, 0, place);
    }
    pictureScreen.drawFrame(whole, net.grid, cell, 1.75);
    if (this.film) this.film.draw();
  }

  // In words, once the query is at rest: a screen reader would never finish otherwise.
  describe() {
    const { net } = this, query = net.query(), chosen = state.heads[this.number];
    let text = `Query: row ${Math.floor(query / net.cols)}, column ${query % net.cols} of ${net.rows} × ${net.cols}.`;
    if (net.averages()) text += ` Mean over ${data.images.length} pictures.`;
    if (chosen !== null) {
      const map = net.head(chosen), k = map.indexOf(map.reduce((a, b) => Math.max(a, b)));
      const row = Math.floor(k / net.shape[1]), col = k % net.shape[1];
      text += ` ${this.tiles[chosen].label}: ` + (net.footprints
        ? `its largest weight is ${map[k].toFixed(2)}, ${row - (net.shape[0] >> 1)} rows and ` +
          `${col - (net.shape[1] >> 1)} columns away.`
        : `mean distance ${net.distance(chosen, query).toFixed(1)} px, most at row ${row}, column ${col} ` +
          `(${percent(map[k])}).`) + ' Over the picture its colours are scaled to its own largest value.';
    }
    this.find('output').textContent = text;
  }
}
