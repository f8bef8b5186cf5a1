// @ts-check
// The theorem in float64, as timm_selfconv.theory.conv_to_attention has it: pure functions.

/**
 * A picture, plane after plane.
 * @typedef {{ channels: number, rows: number, cols: number, values: Float64Array }} Picture
 *
 * A kernel and its heads: size, dilation, the weight of each tap and head, row by row, and the offset [row, column] of each
 * head from its tap. The picture is padded with zeros as far as the kernel reaches. The padded pixels are keys, too.
 * @typedef {{ size: number, dilation: number, weights: number[], alpha: number, moved: number[][] }} Layer
 *
 * Queries: rows and columns from one on, which may lie beyond the picture.
 * @typedef {{ top: number, left: number, rows: number, cols: number }} Window
 */

const NOTHING = 1e-20;  // shares of attention below this don't change a sum of float64

/** @param {{ size: number, dilation: number }} layer */
export const reachOf = ({ size, dilation }) => dilation * (size - 1) / 2;

/** [row, column] of every tap, in pixels from the kernel's middle.
 * @param {{ size: number, dilation: number }} layer */
export function tapsOf({ size, dilation }) {
  return Array.from({ length: size * size }, (_, i) =>
    [Math.floor(i / size), i % size].map(n => (n - (size - 1) / 2) * dilation));
}

/** Where each head looks, in pixels from the query. @param {Layer} layer */
export const centersOf = layer =>
  tapsOf(layer).map((tap, i) => tap.map((offset, axis) => offset + layer.moved[i][axis]));

/** @param {Picture} picture @param {number} width @returns {Picture} */
function pad({ channels, rows, cols, values }, width) {
  const padded = { channels, rows: rows + 2 * width, cols: cols + 2 * width, values: new Float64Array(
    channels * (rows + 2 * width) * (cols + 2 * width)) };
  for (let line = 0; line < channels * rows; line++) {
    const row = Math.floor(line / rows) * padded.rows + line % rows + width;
    padded.values.set(values.subarray(line * cols, (line + 1) * cols), row * padded.cols + width);
  }
  return padded;
}

/** @param {Picture} picture @param {Layer} layer */
export function convolve(picture, layer) {
  const width = reachOf(layer), x = pad(picture, width), { channels, rows, cols } = picture;
  const out = new Float64Array(channels * rows * cols);
  tapsOf(layer).forEach(([down, right], tap) => {
    const weight = layer.weights[tap];
    for (let line = 0, i = 0; line < channels * rows; line++) {
      const row = Math.floor(line / rows) * x.rows + line % rows + width + down;
      for (let k = row * x.cols + width + right, end = k + cols; k < end; k++) out[i++] += weight * x.values[k];
    }
  });
  return out;
}

/**
 * Attention of a query along one axis of `size` keys: the softmax of -alpha (key - query - center)^2. The largest score is
 * subtracted first, because a center may be far outside. `values` are the probabilities from the key `first` on; all others
 * are negligible.
 * @param {number} center @param {number} alpha @param {number} query @param {number} size
 */
function axisProbs(center, alpha, query, size) {
  const nearest = Math.min(size - 1, Math.max(0, Math.round(query + center))), beyond = nearest - query - center;
  const span = Math.ceil(0.5 + Math.sqrt(0.25 - Math.log(NOTHING) / alpha));
  const first = Math.max(0, nearest - span), values = new Float64Array(Math.min(size, nearest + span + 1) - first);
  let sum = 0;
  for (let i = 0; i < values.length; i++) {
    const away = first + i - nearest;
    values[i] = Math.exp(-alpha * away * (away + 2 * beyond));
    sum += values[i];
  }
  for (let i = 0; i < values.length; i++) values[i] /= sum;
  return { first, values };
}

/** Each query's weighted sum of some heads' attention along one axis; heads are [center, weight].
 * @param {number[][]} heads @param {number} alpha @param {number} from @param {number} count @param {number} size */
function axisFactor(heads, alpha, from, count, size) {
  return Array.from({ length: count }, (_, query) => {
    const probs = heads.map(([center]) => axisProbs(center, alpha, from + query, size));
    const first = Math.min(...probs.map(p => p.first)), end = Math.max(...probs.map(p => p.first + p.values.length));
    const values = new Float64Array(end - first);
    probs.forEach((p, head) => {
      for (let i = 0; i < p.values.length; i++) values[p.first - first + i] += heads[head][1] * p.values[i];
    });
    return { first, values };
  });
}

/**
 * Outputs of the queries of a window, by default of all: the sum of the heads' outputs, each times its weight.
 * Gaussian attention is a product of one for rows and one for columns. Heads that look at one row share its factor.
 * @param {Picture} picture @param {Layer} layer @param {number[]} weights @param {Window} window
 */
export function attend(picture, layer, weights = layer.weights, window = { top: 0, left: 0, ...picture }) {
  const width = reachOf(layer), x = pad(picture, width), { channels } = picture, { top, left, rows, cols } = window;
  const out = new Float64Array(channels * rows * cols), byRow = new Map();
  centersOf(layer).forEach(([row, col], head) => {
    if (weights[head] === 0) return;
    if (!byRow.has(row)) byRow.set(row, []);
    byRow.get(row).push([col, weights[head]]);
  });
  for (const [row, heads] of byRow) {
    const along = axisFactor(heads, layer.alpha, left + width, cols, x.cols);
    const down = axisFactor([[row, 1]], layer.alpha, top + width, rows, x.rows);
    const from = Math.min(...down.map(p => p.first)), end = Math.max(...down.map(p => p.first + p.values.length));
    const gathered = new Float64Array(channels * x.rows * cols);
    for (let line = 0; line < channels * x.rows; line++) {
      if (line % x.rows < from || line % x.rows >= end) continue;  // which no query looks at
      for (let col = 0; col < cols; col++) {
        const { first, values } = along[col], start = line * x.cols + first;
        let sum = 0;
        for (let k = 0; k < values.length; k++) sum += values[k] * x.values[start + k];
        gathered[line * cols + col] = sum;
      }
    }
    for (let line = 0; line < channels * rows; line++) {
      const { first, values } = down[line % rows], plane = Math.floor(line / rows) * x.rows;
      for (let k = 0; k < values.length; k++) {
        const start = (plane + first + k) * cols, share = values[k];
        for (let col = 0; col < cols; col++) out[line * cols + col] += share * gathered[start + col];
      }
    }
  }
  return out;
}

/** Each head's own output around a query: NaN where there is no picture.
 * @param {Picture} picture @param {Layer} layer @param {number[]} query @param {number} radius */
export function copiesAround(picture, layer, query, radius) {
  const rows = 2 * radius + 1, cols = rows, top = query[0] - radius, left = query[1] - radius;
  return layer.weights.map((_, head) => {
    const out = attend(picture, layer, layer.weights.map((_, i) => Number(i === head)), { top, left, rows, cols });
    return out.map((value, i) => {
      const row = top + Math.floor(i / cols) % rows, col = left + i % cols;
      return row >= 0 && row < picture.rows && col >= 0 && col < picture.cols ? value : NaN;
    });
  });
}

/** Attention of a query to the pixels around it, a map for each head; NaN beyond the padded picture.
 * @param {Picture} picture @param {Layer} layer @param {number[]} query @param {number} radius */
export function mapsAround(picture, layer, query, radius) {
  const width = reachOf(layer), side = 2 * radius + 1;
  return centersOf(layer).map(center => {
    const [down, along] = [picture.rows, picture.cols].map((count, axis) => {
      const start = query[axis] + width - radius, size = count + 2 * width;
      const { first, values } = axisProbs(center[axis], layer.alpha, query[axis] + width, size);
      return Array.from({ length: side }, (_, i) =>
        start + i >= 0 && start + i < size ? values[start + i - first] || 0 : NaN);
    });
    return Float64Array.from({ length: side * side }, (_, i) => down[Math.floor(i / side)] * along[i % side]);
  });
}

/** Brightness of the photograph under each tap of a query, and in the output of each head: means of the colours.
 * @param {Picture} picture @param {Layer} layer @param {number[]} query @param {Float64Array[]} copies around it */
export function digitsAt(picture, layer, [row, col], copies) {
  const width = reachOf(layer), x = pad(picture, width), plane = x.rows * x.cols;
  const mean = (values, k, step) => [...Array(x.channels).keys()].reduce(
    (sum, c) => sum + values[c * step + k], 0) / x.channels;
  return tapsOf(layer).map(([down, right], tap) => {
    const size = copies[tap].length / x.channels;
    return [mean(x.values, (row + width + down) * x.cols + col + width + right, plane),
      mean(copies[tap], (size - 1) / 2, size)];
  });
}

/** @param {Float64Array} a @param {Float64Array} b @returns {[number, number]} the largest difference, and its index */
export function largestDifference(a, b) {
  let most = 0, at = 0;
  for (let i = 0; i < a.length; i++) {
    const difference = Math.abs(a[i] - b[i]);
    if (difference > most) [most, at] = [difference, i];
  }
  return [most, at];
}

const total = (/** @type {number[]} */ weights) => weights.reduce((sum, w) => sum + Math.abs(w), 0);

/** Lemma 2 with numbers: the four pixels next to a tap each get exp(-alpha) of the attention of the tap. All pixels but the
 * tap get at most 4 exp(-alpha) together, so the output of a head changes by at most this share of the largest pixel.
 * @param {number[]} weights @param {number} alpha @param {number} largestPixel */
export const leakBound = (weights, alpha, largestPixel) =>
  Math.min(1, 4 * Math.exp(-alpha)) * total(weights) * largestPixel;

/** How far float64 can move two sums of as many products apart: half of 2^-52 of each term, for every term and operation.
 * @param {number[]} weights @param {number} largestPixel */
export const roundingBound = (weights, largestPixel) =>
  (weights.length + 16) * Number.EPSILON * total(weights) * largestPixel;

const binomial = (/** @type {number} */ reach, /** @type {number} */ i) => {
  let value = 1;
  for (let k = 1; k <= reach + i; k++) value *= (2 * reach + 1 - k) / k;
  return value;
};
const bell = (reach, i, j) => binomial(reach, i) * binomial(reach, j) / 16 ** reach;
const middle = (i, j) => Number(i === 0 && j === 0);

/** Kernels by name, in any odd size: the weight of the tap at row i and column j from the middle.
 * @type {Object<string, (reach: number, i: number, j: number) => number>} */
export const KERNELS = {
  shift: (reach, i, j) => Number(i === reach && j === reach),
  blur: reach => 1 / (2 * reach + 1) ** 2,
  gauss: bell,
  edges: (reach, i, j) => (2 * reach + 1) ** 2 * middle(i, j) - 1,
  upright: (reach, i, j) => j * binomial(reach, i) * binomial(reach, j) / 16 ** (reach - 1),
  sharpen: (reach, i, j) => 3 * middle(i, j) - 2 * bell(reach, i, j),
  emboss: (reach, i, j) => (i + j) / reach + middle(i, j),
};

/** @param {string} name @param {number} size */
export function kernel(name, size) {
  const reach = (size - 1) / 2;
  return tapsOf({ size, dilation: 1 }).map(([i, j]) => KERNELS[name](reach, i, j));
}

/** A kernel in another size, its middle where it was. @param {number[]} weights @param {number} from @param {number} to */
export function resize(weights, from, to) {
  const shift = (from - to) / 2;
  return Array.from({ length: to * to }, (_, i) => {
    const row = Math.floor(i / to) + shift, col = i % to + shift;
    return row >= 0 && row < from && col >= 0 && col < from ? weights[row * from + col] : 0;
  });
}
