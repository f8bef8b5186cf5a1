// @ts-check
// Attention maps, unpacked from the data of the page.

/** @typedef {import('./drawing.js').Pair} Pair */
/** @typedef {{ image: number, at: Pair, pin: boolean, scale: string, mean: boolean, sort: boolean,
 *              token: boolean, head: number | null, epoch: number | null }} State */

/** @param {string} text bytes as zlib stream in base64 @param {any} Type of the array */
async function unpack(text, Type) {
  const fromBase64 = /** @type {any} */ (Uint8Array).fromBase64;
  let bytes = fromBase64 && fromBase64.call(Uint8Array, text);
  if (!bytes) {  // a plain loop: Uint8Array.from with a function takes ten times as long
    const characters = atob(text);
    bytes = new Uint8Array(characters.length);
    for (let i = 0; i < characters.length; i++) bytes[i] = characters.charCodeAt(i);
  }
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate'));
  return new Type(await new Response(stream).arrayBuffer());
}

/** exp(x - max x) over its sum. @param {Float64Array} scores */
function softmax(scores) {
  const max = scores.reduce((a, b) => Math.max(a, b), -Infinity);
  const probs = scores.map(s => Math.exp(s - max)), sum = probs.reduce((a, b) => a + b, 0);
  return probs.map(p => p / sum);
}

/** A Gaussian on a grid around a query: mean and covariance as the history of a training has them. The history has four
 * digits, too few for long stripes. If the rounded covariance has a negative eigenvalue, the stripe is a pixel wide.
 * @param {Float32Array} head row, column, variance of rows, of columns, covariance
 * @param {Pair} shape @param {number[]} query @param {Float32Array} out */
function gaussianMap([row, col, rows, cols, both], [height, width], [q1, q2], out) {
  const [a, b] = [rows, cols].map(x => Math.max(x, 1e-3)), most = Math.sqrt(Math.max(0, a * b - (a + b) / 12));
  const c = both * both < a * b ? both : Math.sign(both) * most, det = Math.max(a * b - c * c, 1e-6);
  const scores = new Float64Array(height * width);
  for (let k = 0; k < scores.length; k++) {
    const x = Math.floor(k / width) - q1 - row, y = k % width - q2 - col;
    scores[k] = -(b * x * x - 2 * c * x * y + a * y * y) / (2 * det);
  }
  out.set(softmax(scores));
}

/** One layer's maps: of all keys for attention, of a footprint around the query for vector attention. */
export class Layer {
  /** @param {any} spec data of the layer */
  constructor(spec) {
    this.name = /** @type {string} */ (spec.name);
    this.heads = /** @type {number} */ (spec.heads);
    this.shape = /** @type {Pair} */ (spec.shape);
    this.queries = /** @type {Pair} */ (spec.queries);
    this.token = Boolean(spec.token);
    this.shifts = /** @type {[number, number, number][]} */ (spec.shifts || []);  // offset and share of each head
    this.size = this.shape[0] * this.shape[1];
    this.middle = spec.middle || 0;  // the weight of every pixel if all are equal, or 0
    this.step = spec.step;
    this.texts = spec.parts || [];  // a text for each picture, gone once it is unpacked
    this.tables = spec.tables;
    /** @type {any} */
    this.rowScores = this.colScores = this.cross = null;  // from the tables
    this.weights = Boolean(spec.step);
    /** @type {any[]} */
    this.parts = [];
    this.start = this.end = 0;
  }

  /** @param {number} image */
  async load(image) {
    if (this.tables && !this.cross) {
      [this.rowScores, this.colScores, this.cross] = await Promise.all(this.tables.map(text => unpack(text, Float64Array)));
    }
    if (this.texts[image]) {
      this.parts[image] = await unpack(this.texts[image], this.weights ? Int8Array : Uint8Array);
      this.texts[image] = null;
    }
  }

  /** Row and column on the grid of this layer for a cell of another grid.
   * @param {number[]} cell @param {Pair} grid @returns {Pair} */
  cell(cell, grid) {
    const [row, col] = cell.map((x, axis) => Math.floor(x * this.queries[axis] / grid[axis]));
    return [row, col];
  }

  /** The softmax of rows[k1] + cols[k2] + cross (k1 - q1) (k2 - q2): a product of two where nothing couples the axes.
   * @param {number} head @param {Pair} query @param {Float32Array} out */
  positionMap(head, [q1, q2], out) {
    const [rows, cols] = this.shape, cross = this.cross[head];
    const first = head * (2 * rows - 1) + rows - 1 - q1, row = this.rowScores.subarray(first, first + rows);
    const second = head * (2 * cols - 1) + cols - 1 - q2, col = this.colScores.subarray(second, second + cols);
    if (cross === 0) {
      const rowProbs = softmax(row), colProbs = softmax(col);
      for (let i = 0, k = 0; i < rows; i++) for (let j = 0; j < cols; j++, k++) out[k] = rowProbs[i] * colProbs[j];
      return;
    }
    const scores = new Float64Array(this.size);
    for (let i = 0, k = 0; i < rows; i++) {
      for (let j = 0; j < cols; j++, k++) scores[k] = row[i] + col[j] + cross * (i - q1) * (j - q2);
    }
    out.set(softmax(scores));
  }

  /** One head's map of one query: probabilities of all keys, row by row, or weights of its footprint. A byte is the root
   * of a probability in parts of the map's largest; maps sum to 1.
   * @param {number} image @param {number} head @param {Pair} query @param {Float32Array} out */
  map(image, head, [row, col], out) {
    if (this.tables) {
      this.positionMap(head, [row, col], out);
      return;
    }
    const { size, queries: [rows, cols] } = this, parts = this.parts[image];
    const start = ((head * rows + row) * cols + col) * size;
    let sum = 0;
    for (let k = 0; k < size; k++) {
      out[k] = this.weights ? parts[start + k] * this.step : parts[start + k] ** 2;
      sum += out[k];
    }
    if (!this.weights && sum) for (let k = 0; k < size; k++) out[k] /= sum;
  }
}

/** The maps of all layers of a net, for a query on the finest of their grids. */
export class Net {
  /** @param {any} spec data of the page @param {State} state */
  constructor(spec, state) {
    this.state = state;
    this.images = /** @type {number} */ (spec.images.length);
    this.grid = /** @type {Pair} */ (spec.grid);
    this.layers = /** @type {any[]} */ (spec.layers).map(layer => new Layer(layer));
    this.content = Boolean(spec.content);
    this.film = spec.film;
    /** @type {{ layer: Layer, head: number, start: number }[]} */
    this.heads = [];
    let size = 0;
    for (const layer of this.layers) {
      layer.start = size;
      for (let head = 0; head < layer.heads; head++, size += layer.size) this.heads.push({ layer, head, start: size });
      layer.end = size;
    }
    this.total = this.heads.length;
    this.shown = new Float32Array(size);  // the maps on the screen, a head after the other
    this.vector = this.layers[0].weights;
    this.middle = this.layers[0].middle;
    this.token = this.layers.some(layer => layer.token);
    this.loaded = new Set();
  }

  /** The pictures of the maps on the screen: attention by position only is the same in all. */
  wanted() {
    if (!this.content) return [0];
    return this.averages() ? [...Array(this.images).keys()] : [this.state.image];
  }

  ready() { return this.wanted().every(image => this.loaded.has(image)); }

  async load(images = this.wanted()) {
    for (const image of images) {
      await Promise.all(this.layers.map(layer => layer.load(image)));
      this.loaded.add(image);
    }
    if (typeof this.film?.heads === 'string') this.film.heads = await unpack(this.film.heads, Float32Array);
  }

  /** @param {number} number */
  head(number) {
    const { layer, start } = this.heads[number];
    return this.shown.subarray(start, start + layer.size);
  }

  averages() { return this.state.mean && this.content && this.images > 1; }

  /** Whether it shows the attention of the class token, instead of the attention of pixels. */
  ofToken() { return this.state.token && this.token; }

  /** @param {Layer} layer */
  visible(layer) { return this.ofToken() === layer.token; }

  /** @param {number} query @returns {Pair} */
  cell(query) { return [Math.floor(query / this.grid[1]), query % this.grid[1]]; }

  /** The row of the film that is on the screen, which may lie between two epochs; null after the last. */
  epoch() {
    const last = this.film ? this.film.epochs.length - 1 : 0, { epoch } = this.state;
    return epoch === null || epoch >= last ? null : epoch;
  }

  /** Mean and covariances of a head at a place of the film. @param {number} head @param {number} epoch */
  moments(head, epoch) {
    const before = Math.floor(epoch), part = epoch - before, row = i => this.film.heads.subarray(
      5 * (i * this.total + head), 5 * (i * this.total + head) + 5);
    const to = row(Math.min(before + 1, this.film.epochs.length - 1));
    return row(before).map((x, i) => x + part * (to[i] - x));
  }

  /** How many heads give more than half of their attention to one offset after an epoch, on a grid without a border.
   * @param {number} epoch */
  sharp(epoch) {
    return this.heads.filter(({ layer: { shape: [rows, cols] } }, head) => {
      const out = new Float32Array((2 * rows - 1) * (2 * cols - 1));
      gaussianMap(this.moments(head, epoch), [2 * rows - 1, 2 * cols - 1], [rows - 1, cols - 1], out);
      return out.some(p => p > 0.5);
    }).length;
  }

  /** All visible heads' maps of one query into `shown`, of the chosen picture or averaged over all.
   * @param {number} query */
  show(query) {
    const cell = this.cell(query), images = this.wanted(), epoch = this.epoch();
    this.shown.fill(0);
    this.heads.forEach(({ layer, head, start }, number) => {
      if (!this.visible(layer)) return;
      const own = layer.cell(cell, this.grid), one = new Float32Array(layer.size);
      if (epoch !== null) {
        gaussianMap(this.moments(number, epoch), layer.shape, own, one);
        this.shown.set(one, start);
        return;
      }
      for (const image of images) {
        layer.map(image, head, own, one);
        for (let k = 0; k < layer.size; k++) this.shown[start + k] += one[k] / images.length;
      }
    });
  }

  /** Mean distance of a head's attention from the query, in pixels of its layer's grid.
   * @param {number} number @param {number} query */
  distance(number, query) {
    const { layer } = this.heads[number], [row, col] = layer.cell(this.cell(query), this.grid), width = layer.shape[1];
    const map = this.head(number);
    let sum = 0;
    for (let k = 0; k < map.length; k++) sum += map[k] * Math.hypot(Math.floor(k / width) - row, k % width - col);
    return sum;
  }

  /** The same, mean over the queries that `timm-selfconv heads` takes, all but those at the border; of large grids over
   * nine by nine of them, spread as wide as steps that fall on different places of windows. */
  meanDistances() {
    const places = n => n <= 18 ? Array.from({ length: Math.max(1, n - 2) }, (_, k) => k + (n > 2 ? 1 : 0))
      : Array.from({ length: 9 }, (_, k) => Math.floor((k + 0.5) * n / 9));
    const sums = new Array(this.total).fill(0);
    const queries = places(this.grid[0]).flatMap(i => places(this.grid[1]).map(j => i * this.grid[1] + j));
    for (const query of queries) {
      this.show(query);
      for (let head = 0; head < this.total; head++) sums[head] += this.distance(head, query);
    }
    return sums.map(sum => sum / queries.length);
  }

  query() {
    const [row, col] = this.state.at.map((part, axis) =>
      Math.min(this.grid[axis] - 1, Math.floor(part * this.grid[axis])));
    return row * this.grid[1] + col;
  }
}
