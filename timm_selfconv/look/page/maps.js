// Attention maps, from what the page holds of them.
'use strict';

async function unpack(text, Type) {
  const bytes = Uint8Array.from(atob(text), character => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate'));
  return new Type(await new Response(stream).arrayBuffer());
}

// exp(x - max x) over its sum
function softmax(scores) {
  const max = scores.reduce((a, b) => Math.max(a, b), -Infinity);
  const probs = scores.map(s => Math.exp(s - max));
  const sum = probs.reduce((a, b) => a + b, 0);
  return probs.map(p => p / sum);
}

// A net's maps: of all keys for attention, of a footprint around the query for vector attention.
class Net {
  constructor(spec) {
    Object.assign(this, spec);
    [this.rows, this.cols] = spec.grid;  // of queries
    this.shape = spec.footprints ? spec.footprints.shape : spec.grid;  // of a map
    this.size = this.shape[0] * this.shape[1];
    this.total = spec.heads.reduce((a, b) => a + b, 0);
    this.shown = new Float32Array(this.total * this.size);  // the maps on the screen, a head after the other
    this.middle = spec.footprints ? spec.footprints.middle : 0;  // the weight that says nothing
    this.views = spec.maps && spec.maps.views === 3 ? ['all', 'position', 'content'] : ['all'];
  }

  async load() {
    const { tables, maps, film } = this;
    if (tables) {
      [this.rowScores, this.colScores, this.cross] = await Promise.all(
        [tables.rows, tables.cols, tables.cross].map(text => unpack(text, Float64Array)));
    }
    if (maps) {
      [this.parts, this.peaks] = await Promise.all([unpack(maps.parts, Uint8Array), unpack(maps.peaks, Float32Array)]);
    }
    if (this.footprints) {
      this.footprints = (await Promise.all(this.footprints.layers.map(async (layer, i) => {
        const weights = await unpack(layer.weights, Int8Array), heads = this.heads[i];
        return Array.from({ length: heads }, (_, head) => ({ ...layer, weights, heads, head }));
      }))).flat();
    }
    if (film) film.heads = await unpack(film.heads, Float32Array);
    this.tables = tables && {};  // the texts are no longer needed
    this.maps = maps && { levels: maps.levels };
  }

  // The softmax of rows[k1] + cols[k2] + cross (k1 - q1) (k2 - q2): a product of two where nothing couples the axes.
  positionMap(head, query, out) {
    const { rows, cols } = this, q1 = Math.floor(query / cols), q2 = query % cols, cross = this.cross[head];
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

  // The footprint's weights, of the query that this layer's own grid has there.
  footprintMap(image, head, query, out) {
    const { grid: [rows, cols], weights, step, heads, head: map } = this.footprints[head];
    const row = Math.floor(Math.floor(query / this.cols) * rows / this.rows);
    const index = ((image * heads + map) * rows + row) * cols + Math.floor(query % this.cols * cols / this.cols);
    for (let k = 0; k < this.size; k++) out[k] = weights[index * this.size + k] * step;
  }

  // One head's map of one query: probabilities of all keys, row by row, or weights of its footprint.
  map(view, image, head, query, out) {
    if (this.footprints) return this.footprintMap(image, head, query, out);
    if (this.tables) return this.positionMap(head, query, out);
    const { size, parts, peaks } = this, number = this.views.indexOf(view) * data.images.length + image;
    const index = (number * this.total + head) * size + query, step = peaks[index] / this.maps.levels;
    for (let k = 0; k < size; k++) out[k] = parts[index * size + k] * step;
  }

  head(number) { return this.shown.subarray(number * this.size, (number + 1) * this.size); }

  // Whether what it shows is a mean over the pictures; attention by position only is the same in all of them.
  averages() { return state.mean && !this.tables && data.images.length > 1; }

  // All heads' maps of one query into `shown`, of the picture chosen or averaged over all.
  show(query) {
    const view = this.views.includes(state.view) ? state.view : 'all';
    const images = this.averages() ? data.images.map((_, i) => i) : [state.image];
    const one = new Float32Array(this.size);
    this.shown.fill(0);
    for (let head = 0; head < this.total; head++) {
      const out = this.head(head);
      for (const image of images) {
        this.map(view, image, head, query, one);
        for (let k = 0; k < this.size; k++) out[k] += one[k] / images.length;
      }
    }
  }

  // Mean distance of what a head attends to from the query, in pixels of the grid.
  distance(head, query) {
    const q1 = Math.floor(query / this.cols), q2 = query % this.cols;
    return this.head(head).reduce(
      (sum, p, k) => sum + p * Math.hypot(Math.floor(k / this.cols) - q1, k % this.cols - q2), 0);
  }

  // The same, a mean over up to 8 x 8 queries spread over the grid.
  meanDistances() {
    const sums = new Array(this.total).fill(0), di = Math.ceil(this.rows / 8), dj = Math.ceil(this.cols / 8);
    let queries = 0;
    for (let i = di >> 1; i < this.rows; i += di) {
      for (let j = dj >> 1; j < this.cols; j += dj, queries++) {
        this.show(i * this.cols + j);
        for (let head = 0; head < this.total; head++) sums[head] += this.distance(head, i * this.cols + j);
      }
    }
    return sums.map(sum => sum / queries);
  }

  query() {
    const cell = (part, n) => Math.min(n - 1, Math.floor(part * n));
    return cell(state.at[0], this.rows) * this.cols + cell(state.at[1], this.cols);
  }
}
