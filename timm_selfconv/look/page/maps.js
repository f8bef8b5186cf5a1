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

// One layer's maps: of all keys for attention, of a footprint around the query for vector attention.
class Layer {
  constructor(spec) {
    Object.assign(this, spec);
    this.size = this.shape[0] * this.shape[1];
    this.middle = spec.middle || 0;  // the weight that says nothing
  }

  async load() {
    const { tables, maps, weights } = this;
    if (tables) {
      [this.rowScores, this.colScores, this.cross] = await Promise.all(tables.map(text => unpack(text, Float64Array)));
    }
    if (maps) {
      [this.parts, this.peaks] = await Promise.all([unpack(maps.parts, Uint8Array), unpack(maps.peaks, Float32Array)]);
      this.maps = { levels: maps.levels, views: maps.views };  // the texts are no longer needed
    }
    if (weights) this.parts = await unpack(weights, Int8Array);
    this.tables = Boolean(tables);
    this.weights = Boolean(weights);
  }

  // Row and column of the query that this layer's own grid has where another grid has a cell.
  cell(cell, grid) { return cell.map((x, axis) => Math.floor(x * this.queries[axis] / grid[axis])); }

  // The softmax of rows[k1] + cols[k2] + cross (k1 - q1) (k2 - q2): a product of two where nothing couples the axes.
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

  // One head's map of one query: probabilities of all keys, row by row, or weights of its footprint.
  map(view, image, head, [row, col], out) {
    if (this.tables) return this.positionMap(head, [row, col], out);
    const { size, parts, peaks, queries: [rows, cols] } = this;
    const index = (((view * data.images.length + image) * this.heads + head) * rows + row) * cols + col;
    const step = this.maps ? peaks[index] / this.maps.levels : this.step;
    for (let k = 0; k < size; k++) out[k] = parts[index * size + k] * step;
  }
}

// The maps of all layers of a net, for a query on the finest of their grids.
class Net {
  constructor(spec) {
    Object.assign(this, spec);
    [this.rows, this.cols] = spec.grid;
    this.layers = spec.layers.map(layer => new Layer(layer));
    this.heads = [];
    let size = 0;
    for (const layer of this.layers) {
      layer.start = size;
      for (let head = 0; head < layer.heads; head++, size += layer.size) this.heads.push({ layer, head, start: size });
      layer.end = size;
    }
    this.total = this.heads.length;
    this.shown = new Float32Array(size);  // the maps on the screen, a head after the other
    const [{ weights, maps }] = spec.layers;
    Object.assign(this, { vector: Boolean(weights), levels: maps && maps.levels });
    this.middle = this.layers[0].middle;
    this.views = maps && maps.views === 3 ? ['all', 'position', 'content'] : ['all'];
    this.token = this.layers.some(layer => layer.token);
  }

  async load() {
    await Promise.all(this.layers.map(layer => layer.load()));
    if (this.film) this.film.heads = await unpack(this.film.heads, Float32Array);
  }

  head(number) {
    const { layer, start } = this.heads[number];
    return this.shown.subarray(start, start + layer.size);
  }

  // Whether what it shows is a mean over the pictures; attention by position only is the same in all of them.
  averages() { return state.mean && this.content && data.images.length > 1; }

  // Whether it shows where the class token looks, in the place of what pixels do.
  ofToken() { return state.token && this.token; }

  visible(layer) { return this.ofToken() === Boolean(layer.token); }

  cell(query) { return [Math.floor(query / this.cols), query % this.cols]; }

  // All visible heads' maps of one query into `shown`, of the picture chosen or averaged over all.
  show(query) {
    const view = Math.max(0, this.views.indexOf(state.view)), cell = this.cell(query);
    const images = this.averages() ? data.images.map((_, i) => i) : [this.content ? state.image : 0];
    this.shown.fill(0);
    for (const { layer, head, start } of this.heads) {
      if (!this.visible(layer)) continue;
      const own = layer.cell(cell, this.grid), one = new Float32Array(layer.size);
      for (const image of images) {
        layer.map(view, image, head, own, one);
        for (let k = 0; k < layer.size; k++) this.shown[start + k] += one[k] / images.length;
      }
    }
  }

  // Mean distance of what a head attends to from the query, in pixels of its layer's grid.
  distance(number, query) {
    const { layer } = this.heads[number], [row, col] = layer.cell(this.cell(query), this.grid), width = layer.shape[1];
    const away = k => Math.hypot(Math.floor(k / width) - row, k % width - col);
    return this.head(number).reduce((sum, p, k) => sum + p * away(k), 0);
  }

  // The same, a mean over up to 9 x 9 queries spread over the grid.
  meanDistances() {
    // at most nine along an axis: with steps as wide as windows they would all stand at one place of their windows
    const places = n => {
      const count = Math.min(n, 9);
      return Array.from({ length: count }, (_, k) => Math.floor((k + 0.5) * n / count));
    };
    const sums = new Array(this.total).fill(0);
    const queries = places(this.rows).flatMap(i => places(this.cols).map(j => i * this.cols + j));
    for (const query of queries) {
      this.show(query);
      for (let head = 0; head < this.total; head++) sums[head] += this.distance(head, query);
    }
    return sums.map(sum => sum / queries.length);
  }

  query() {
    const cell = (part, n) => Math.min(n - 1, Math.floor(part * n));
    return cell(state.at[0], this.rows) * this.cols + cell(state.at[1], this.cols);
  }
}
