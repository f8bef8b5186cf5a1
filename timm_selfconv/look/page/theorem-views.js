// What the page draws: pictures, where the heads look, their maps, the limit.

const powers = text => text.replace(/./g, c => '⁰¹²³⁴⁵⁶⁷⁸⁹'[c] || '⁻');

// three digits for the eye; below a thousandth with a power of ten
function digits(x) {
  if (x === 0 || Math.abs(x) >= 1e-3) return minus(String(Number(x.toPrecision(3))));
  const [front, power] = x.toExponential(1).split('e');
  return minus(`${front} × 10${powers(power)}`);
}

// A weight's colour: orange below zero, violet above, and what can be read on it.
function weightColours(weight, most) {
  const word = PUOR[Math.round(127.5 + 127.5 * (most ? weight / most : 0))];
  const rgb = [0, 8, 16].map(bits => word >> bits & 255);
  return [`rgb(${rgb})`, rgb[0] + 2 * rgb[1] + rgb[2] / 2 > 450 ? '#000' : '#fff'];
}

// A square with its pixels on one canvas, and frames and heads in the screen's pixels on another above it.
class Stage {
  constructor(section) {
    this.box = document.querySelector(`#${section} .stage`);
    const [below, above] = this.box.querySelectorAll('canvas');
    this.pixels = below;
    this.screen = new Screen(above);
    new ResizeObserver(() => {
      this.screen.fit();
      redraw();
    }).observe(this.box);
  }
  get place() {
    return [0, 0, this.screen.canvas.width, this.screen.canvas.height];
  }
  // planes of a picture, from black to white; NaN shows the page
  show({ channels, rows, cols, values }, black = 0, white = 1) {
    Object.assign(this.pixels, { width: cols, height: rows });
    const context = this.pixels.getContext('2d'), image = context.createImageData(cols, rows), plane = rows * cols;
    for (let i = 0; i < plane; i++) {
      for (let c = 0; c < 3; c++) {
        image.data[4 * i + c] = 255 * (values[c % channels * plane + i] - black) / (white - black);
      }
      image.data[4 * i + 3] = Number.isNaN(values[i]) ? 0 : 255;
    }
    context.putImageData(image, 0, 0);
  }
  showMap(map, rows, cols, most) {
    const atlas = new Atlas(1, [rows, cols]);
    atlas.fill(map, most);
    Object.assign(this.pixels, { width: cols, height: rows });
    this.pixels.getContext('2d').drawImage(atlas.canvas, 0, 0);
  }
  frame(grid, cell) {
    this.screen.clear();
    this.screen.drawFrame(this.place, grid, cell, 1.5);
  }
}

// The padded picture around the query, as a picture.
function around(picture, layer, query, radius) {
  const width = reachOf(layer), x = pad(picture, width), side = 2 * radius + 1;
  const values = Float64Array.from({ length: x.channels * side * side }, (_, i) => {
    const [plane, row, col] = [Math.floor(i / side / side), Math.floor(i / side) % side, i % side];
    const [r, c] = [row + query[0] + width - radius, col + query[1] + width - radius];
    return r >= 0 && r < x.rows && c >= 0 && c < x.cols ? x.values[(plane * x.rows + r) * x.cols + c] : NaN;
  });
  return { channels: x.channels, rows: side, cols: side, values };
}

// Every head as a dot on the pixel it looks at, in a circle of its standard deviation; taps are squares.
function drawHeads(stage, layer, radius, chosen) {
  const { screen } = stage, { context, ratio } = screen, side = 2 * radius + 1, [, , width] = stage.place;
  const cell = width / side, dot = Math.min(11 * ratio, 0.38 * cell * layer.dilation);
  const most = Math.max(...layer.weights.map(Math.abs)), x = offset => (offset + radius + 0.5) * cell;
  const taps = tapsOf(layer), centers = centersOf(layer);
  const circle = (row, col, size) => {
    context.beginPath();
    context.arc(x(col), x(row), size, 0, 2 * Math.PI);
  };
  const outline = (thick, colours) => colours.forEach((colour, i) => {
    context.lineWidth = (colours.length - i) * thick * ratio;
    context.strokeStyle = colour;
    context.stroke();
  });
  stage.frame([side, side], [radius, radius]);
  centers.forEach(([row, col], head) => {
    circle(row, col, cell / Math.sqrt(2 * layer.alpha));
    context.globalAlpha = 0.16;
    context.fillStyle = weightColours(layer.weights[head], most)[0];
    context.fill();
    context.globalAlpha = head === chosen ? 1 : 0.45;
    outline(1, ['#000', '#fff']);
    context.globalAlpha = 1;
  });
  taps.forEach(([row, col], head) => {
    if (layer.moved[head].every(part => part === 0)) return;
    screen.drawFrame(stage.place, [side, side], [row + radius, col + radius], 0.75);
    context.beginPath();
    context.moveTo(x(col), x(row));
    context.lineTo(x(col + layer.moved[head][1]), x(row + layer.moved[head][0]));
    outline(1.5, ['#000', '#fff']);
  });
  context.textAlign = 'center';
  context.textBaseline = 'middle';
  const last = [...taps.keys()].sort((a, b) => (a === chosen) - (b === chosen));
  for (const head of last) {
    const [row, col] = centers[head], [colour, text] = weightColours(layer.weights[head], most);
    circle(row, col, dot);
    outline(head === chosen ? 4 : 2, ['#000', '#fff']);
    context.fillStyle = colour;
    context.fill();
    context.fillStyle = text;
    context.font = `${head === chosen ? 700 : 400} ${1.05 * dot}px system-ui, sans-serif`;
    context.fillText(head + 1, x(col), x(row) + 0.06 * dot);
  }
}

// The maps, a button each, in the kernel's own layout.
class Tiles {
  constructor(box, choose) {
    this.box = box;
    this.choose = choose;
    this.tiles = [];
  }
  make(size, radius) {
    const side = 2 * radius + 1;
    this.box.style.setProperty('--many', size);
    this.box.style.setProperty('--cell', `${100 / side}%`);
    this.tiles = Array.from({ length: size * size }, (_, head) => {
      const atlas = new Atlas(1, [side, side]), label = element('span');
      const button = element('button', { class: 'tile', type: 'button' }, element('div', {}, atlas.canvas), label);
      button.addEventListener('click', () => this.choose(head));
      button.addEventListener('keydown', event => {
        const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: size, ArrowUp: -size }[event.key];
        if (!step || !this.tiles[head + step]) return;
        event.preventDefault();
        this.choose(head + step);
        this.tiles[head + step].button.focus();
      });
      return { atlas, button, label };
    });
    this.box.replaceChildren(...this.tiles.map(({ button }) => button));
  }
  // each map in parts of the largest of all, which is returned
  draw(maps, { weights, moved }, chosen) {
    const most = Math.max(...maps.map(map => map.reduce((a, b) => b > a ? b : a, 0)));
    this.tiles.forEach(({ atlas, button, label }, head) => {
      atlas.fill(maps[head], most);
      label.textContent = `×${minus(String(Number(weights[head].toPrecision(2))))}`;
      button.setAttribute('aria-label', `Head ${head + 1}, weight ${digits(weights[head])}` +
        (moved[head].some(part => part !== 0) ? ', off its tap' : ''));
      button.setAttribute('aria-pressed', head === chosen);
      button.tabIndex = head === chosen ? 0 : -1;  // one tab stop
    });
    return most;
  }
}

// Differences over sharpness, both in powers of ten: what Lemma 2 allows, what was measured, where one is.
class Limit {
  constructor(svg, [least, most]) {
    this.svg = svg;
    this.x = alpha => 36 + 252 * Math.log(alpha / least) / Math.log(most / least);
    this.y = error => 14 + 12.6 * (2 - Math.max(-18, Math.min(2, Math.log10(error))));
    this.axes = [
      ...[0, -4, -8, -12, -16].flatMap(power => [
        this.make('line', { class: 'grid', x1: 36, x2: 288, y1: this.y(10 ** power), y2: this.y(10 ** power) }),
        this.make('text', { x: 31, y: this.y(10 ** power) + 3.5, 'text-anchor': 'end' },
          power ? `10${powers(String(power))}` : '1')]),
      ...[0.1, 1, 10, 46].map(alpha => this.make('text', { x: this.x(alpha), y: 281, 'text-anchor': 'middle' }, alpha)),
      this.make('text', { x: 162, y: 297, 'text-anchor': 'middle' }, 'sharpness α')];
  }
  make(tag, attributes, ...text) {
    const made = document.createElementNS('http://www.w3.org/2000/svg', tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...text);
    return made;
  }
  line(points, cls) {
    return this.make('polyline', { class: cls, points: points.map(([a, e]) => `${this.x(a)},${this.y(e)}`).join(' ') });
  }
  draw(allowed, measured, alpha, error) {
    const [x, y] = [this.x(alpha), this.y(error)];
    this.svg.replaceChildren(
      ...this.axes, this.line(allowed, 'allowed'), this.line(measured, 'measured'),
      this.make('line', { class: 'now', x1: x, x2: x, y1: 14, y2: 266 }),
      this.make('circle', { class: 'now', cx: x, cy: y, r: 5 }));
  }
}
