// The maths of the page, as timm_selfconv.theory.conv_to_attention has it, in float64: pure functions.
//
// A picture is {channels, rows, cols, values}, plane after plane. A layer is {size, dilation, weights, alpha, moved}:
// size and dilation of the kernel, a weight per tap or head, last axis fastest, and [row, column] that each head is off
// its tap. The picture is padded with zeros as far as the kernel reaches, and what is padded is a key like any other.

const NOTHING = 1e-20;  // shares of attention below this don't change a sum of float64

const reachOf = ({ size, dilation }) => dilation * (size - 1) / 2;

// [row, column] of every tap, in pixels from the kernel's middle
function tapsOf({ size, dilation }) {
  return Array.from({ length: size * size }, (_, i) =>
    [Math.floor(i / size), i % size].map(n => (n - (size - 1) / 2) * dilation));
}

// where each head looks, in pixels from the query
function centersOf(layer) {
  return tapsOf(layer).map((tap, i) => tap.map((offset, axis) => offset + layer.moved[i][axis]));
}

function pad({ channels, rows, cols, values }, width) {
  const padded = { channels, rows: rows + 2 * width, cols: cols + 2 * width };
  padded.values = new Float64Array(channels * padded.rows * padded.cols);
  for (let line = 0; line < channels * rows; line++) {
    const row = Math.floor(line / rows) * padded.rows + line % rows + width;
    padded.values.set(values.subarray(line * cols, (line + 1) * cols), row * padded.cols + width);
  }
  return padded;
}

function convolve(picture, layer) {
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

// What the query at a position of one axis gives to each of its `size` keys: the softmax of
// -alpha (key - query - center)^2, with the score of the key nearest to the center for zero, however far away that is.
// {first, values} are the keys that get something.
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

// Each of `count` queries' weighted sum of some heads' attention along one axis of the padded picture.
function axisFactor(heads, alpha, width, count) {
  return Array.from({ length: count }, (_, query) => {
    const probs = heads.map(([center]) => axisProbs(center, alpha, query + width, count + 2 * width));
    const first = Math.min(...probs.map(p => p.first)), end = Math.max(...probs.map(p => p.first + p.values.length));
    const values = new Float64Array(end - first);
    probs.forEach((p, head) => {
      for (let i = 0; i < p.values.length; i++) values[p.first - first + i] += heads[head][1] * p.values[i];
    });
    return { first, values };
  });
}

// Gaussian attention is a product of one for rows and one for columns. Heads that look at one row share its factor.
function attend(picture, layer) {
  const width = reachOf(layer), x = pad(picture, width), { channels, rows, cols } = picture;
  const out = new Float64Array(channels * rows * cols), byRow = new Map();
  centersOf(layer).forEach(([row, col], head) => {
    if (!byRow.has(row)) byRow.set(row, []);
    byRow.get(row).push([col, layer.weights[head]]);
  });
  for (const [row, heads] of byRow) {
    if (heads.every(([, weight]) => weight === 0)) continue;
    const along = axisFactor(heads, layer.alpha, width, cols), down = axisFactor([[row, 1]], layer.alpha, width, rows);
    const gathered = new Float64Array(channels * x.rows * cols);
    for (let line = 0, i = 0; line < channels * x.rows; line++) {
      for (const { first, values } of along) {
        const start = line * x.cols + first;
        let sum = 0;
        for (let k = 0; k < values.length; k++) sum += values[k] * x.values[start + k];
        gathered[i++] = sum;
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

// What a query gives to the pixels around it, up to `radius` away: a map per head; NaN beyond the padded picture.
function mapsAround(picture, layer, query, radius) {
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

const largestDifference = (a, b) => a.reduce((most, value, i) => Math.max(most, Math.abs(value - b[i])), 0);

// Lemma 2 with numbers: a sharp head gives exp(-alpha) of what its tap gets to each of the four pixels beside it. That
// makes 4 exp(-alpha) at most, all other pixels counted, which moves its output by so much of the largest pixel.
const leakBound = (weights, alpha, largestPixel) =>
  Math.min(1, 4 * Math.exp(-alpha)) * weights.reduce((sum, w) => sum + Math.abs(w), 0) * largestPixel;

// Kernels by name, in any odd size: the weight of the tap at row i and column j from the middle.
const binomial = (reach, i) => {
  let value = 1;
  for (let k = 1; k <= reach + i; k++) value *= (2 * reach + 1 - k) / k;
  return value;
};
const bell = (reach, i, j) => binomial(reach, i) * binomial(reach, j) / 16 ** reach;
const middle = (i, j) => Number(i === 0 && j === 0);
const KERNELS = {
  blur: reach => 1 / (2 * reach + 1) ** 2,
  gauss: bell,
  edges: (reach, i, j) => (2 * reach + 1) ** 2 * middle(i, j) - 1,
  upright: (reach, i, j) => j * binomial(reach, i) * binomial(reach, j) / 16 ** (reach - 1),
  sharpen: (reach, i, j) => 3 * middle(i, j) - 2 * bell(reach, i, j),
  emboss: (reach, i, j) => (i + j) / reach + middle(i, j),
  shift: (reach, i, j) => Number(i === reach && j === reach),
};

function kernel(name, size) {
  const reach = (size - 1) / 2;
  return tapsOf({ size, dilation: 1 }).map(([i, j]) => KERNELS[name](reach, i, j));
}

// A kernel in another size, its middle where it was.
function resize(weights, from, to) {
  const shift = (from - to) / 2;
  return Array.from({ length: to * to }, (_, i) => {
    const row = Math.floor(i / to) + shift, col = i % to + shift;
    return row >= 0 && row < from && col >= 0 && col < from ? weights[row * from + col] : 0;
  });
}
