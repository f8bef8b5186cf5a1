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
    this.views = spec.maps && spec.maps.rows ? ['all', 'position', 'content'] : ['all'];
  }

  async load() {
    const packed = this.tables || this.maps || {}, Scores = this.tables ? Float64Array : Int32Array;
    if (packed.rows) {
      [this.rowScores, this.colScores, this.cross] = await Promise.all([
        unpack(packed.rows, Scores), unpack(packed.cols, Scores),
        unpack(packed.cross, this.tables ? Float64Array : Float32Array)]);
    }
    if (this.maps) {
      [this.larger, this.peaks] = await Promise.all(
        [unpack(packed.larger, Uint8Array), unpack(packed.peaks, Float32Array)]);
      this.levels = packed.levels;
    }
    if (this.footprints) {
      this.footprints = (await Promise.all(this.footprints.layers.map(async (layer, i) => {
        const weights = await unpack(layer.weights, Int8Array), heads = this.heads[i];
        return Array.from({ length: heads }, (_, head) => ({ ...layer, weights, heads, head }));
      }))).flat();
    }
    this.tables = this.tables && {};  // the texts are no longer needed
    this.maps = this.maps && {};
  }

  // The scores of the terms that know offsets, of one query: rows[k1] + cols[k2] + cross (k1 - q1) (k2 - q2).
  offsetScores(image, head, query) {
    const { rows, cols } = this, q1 = Math.floor(query / cols), q2 = query % cols;
    if (this.tables) {
      const row = head * (2 * rows - 1) + rows - 1 - q1, col = head * (2 * cols - 1) + cols - 1 - q2;
      return [this.rowScores.subarray(row, row + rows), this.colScores.subarray(col, col + cols), this.cross[head]];
    }
    const index = (image * this.total + head) * this.size + query, step = 1 / (3 * this.levels);
    const axis = (scores, n) => Float32Array.from(scores.subarray(index * n, (index + 1) * n), s => s * step);
    return [axis(this.rowScores, rows), axis(this.colScores, cols), this.cross[index]];
  }

  // Their softmax: a product of two where nothing couples the axes.
  positionMap(image, head, query, out) {
    const { rows, cols } = this, [row, col, cross] = this.offsetScores(image, head, query);
    if (cross === 0) {
      const rowProbs = softmax(row), colProbs = softmax(col);
      for (let i = 0, k = 0; i < rows; i++) for (let j = 0; j < cols; j++, k++) out[k] = rowProbs[i] * colProbs[j];
      return;
    }
    const q1 = Math.floor(query / cols), q2 = query % cols, scores = new Float64Array(this.size);
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
    if (this.tables || view === 'position') return this.positionMap(image, head, query, out);
    const { rows, cols, size, levels } = this, index = (image * this.total + head) * size + query;
    const peak = this.peaks[view === 'content' ? this.peaks.length / 2 + index : index] / levels;
    const larger = this.larger.subarray(index * size, (index + 1) * size);
    if (!this.rowScores) {
      for (let k = 0; k < size; k++) out[k] = larger[k] * peak;
      return;
    }
    // a byte holds the larger of the two maps' parts, all terms' and content's; exp(scores) is the first to the second
    const [row, col, cross] = this.offsetScores(image, head, query), sign = view === 'content' ? -1 : 1;
    const q1 = Math.floor(query / cols), q2 = query % cols;
    for (let i = 0, k = 0; i < rows; i++) {
      for (let j = 0; j < cols; j++, k++) {
        const score = sign * (row[i] + col[j] + cross * (i - q1) * (j - q2));
        out[k] = larger[k] * peak * (score < 0 ? Math.exp(score) : 1);
      }
    }
  }

  head(number) { return this.shown.subarray(number * this.size, (number + 1) * this.size); }

  // All heads' maps of one query into `shown`, of the picture chosen or averaged over all.
  show(query) {
    const view = this.views.includes(state.view) ? state.view : 'all';
    const images = state.mean && !this.tables ? data.images.map((_, i) => i) : [state.image];
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
