// The film of a training: where every head looked after each epoch, relative to the query (paper, Fig. 3).

// the figures' colours of heads
const HEADS = ['#332288', '#0077bb', '#2b8a7b', '#117733', '#7f7f1e', '#a86a00', '#cc4c5c', '#882255', '#aa4499'];
const HALF = Math.sqrt(2 * Math.LN2);  // standard deviations around a 2-D Gaussian's centre that hold half of it
const EPOCH = 400;  // milliseconds
let player = 0;

class Film {
  constructor(panel) {
    const { net } = panel;
    Object.assign(this, { panel, net, last: net.film.loss.length - 1 });
    this.find = selector => panel.find(`.film ${selector}`);
    this.slider = this.find('input');
    this.slider.max = this.last;
    this.slider.addEventListener('input', () => {
      pause();
      update({ epoch: Math.round(this.slider.value) });
    });
    this.slider.addEventListener('keydown', event => {  // an epoch a key; the browser's own step is a fraction of one
      const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
      if (step) {
        pause();
        update({ epoch: Math.min(this.last, Math.max(0, Math.round(this.epoch()) + step)) });
      } else if (event.key === ' ') {
        this.toggle();
      } else {
        return;
      }
      event.preventDefault();
    });
    this.find('button').addEventListener('click', () => this.toggle());
    this.screens = net.layers.map(({ name }) => {
      const canvas = element('canvas', { role: 'img', 'aria-label': `${name}: where the heads look` });
      this.find('.panels').append(element('figure', {}, canvas, element('figcaption', {}, name)));
      return new Screen(canvas);
    });
  }

  epoch() { return Math.min(state.epoch ?? this.last, this.last); }

  // From the start again once it has come to the end; in whole epochs where people prefer less motion.
  toggle() {
    if (player) return pause();
    const begin = this.epoch() < this.last ? this.epoch() : 0, start = performance.now();
    const still = matchMedia('(prefers-reduced-motion: reduce)').matches;
    const step = now => {
      const epoch = Math.min(this.last, begin + Math.max(0, now - start) / EPOCH);
      player = epoch < this.last ? requestAnimationFrame(step) : 0;
      update({ epoch: still ? Math.floor(epoch) : epoch });
    };
    player = requestAnimationFrame(step);
  }

  fit() { for (const screen of this.screens) screen.fit(); }

  draw() {
    const { net, last, screens } = this, epoch = this.epoch(), before = Math.floor(epoch), part = epoch - before;
    const numbers = 5 * net.total, shown = Math.round(epoch), loss = net.film.loss[shown], top1 = net.film.top1[shown];
    const row = i => net.film.heads.subarray(Math.min(i, last) * numbers, (Math.min(i, last) + 1) * numbers);
    const [from, to] = [row(before), row(before + 1)];
    const heads = from.map((x, i) => x + part * (to[i] - x));
    const [now, end] = [shown, last].map(i => Number(net.film.epochs[i].toPrecision(3)));
    const text = [shown ? `after epoch ${now} of ${end}` : `untrained, before ${end} epochs`]
      .concat(loss === null ? [] : [`training loss ${loss.toFixed(2)}`])
      .concat(top1 === null ? [] : [`${top1.toFixed(1)} % of the validation images right`]).join(', ');
    this.slider.value = epoch;
    this.slider.setAttribute('aria-valuetext', text);
    this.find('header p').textContent = text;
    this.find('button').textContent = player ? 'Pause' : 'Play';
    let first = 0;
    screens.forEach((screen, layer) => {
      const next = first + net.layers[layer].heads;
      this.drawLayer(screen, heads.subarray(5 * first, 5 * next), layer);
      first = next;
    });
  }

  // Ellipses that end at the border of the grid around its middle query, and numbered dots.
  drawLayer({ context, canvas, ratio }, heads, layer) {
    const [rows, cols] = this.net.grid, margin = 1, unit = canvas.width / (cols + 2 * margin);
    const x = col => (col + (cols >> 1) + 0.5 + margin) * unit, y = row => (row + (rows >> 1) + 0.5 + margin) * unit;
    const box = [margin * unit, margin * unit, cols * unit, rows * unit];
    const chosen = this.panel.tiles[state.heads[this.panel.number]];
    context.fillStyle = '#fff';
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.fillStyle = '#f5f5f5';
    context.fillRect(...box);
    context.font = `600 ${9 * ratio}px system-ui, sans-serif`;
    for (const dots of [false, true]) {
      context.save();
      if (!dots) {
        context.beginPath();
        context.rect(...box);
        context.clip();
      }
      for (let head = 0; head < heads.length / 5; head++) {
        const [row, col, rowVariance, colVariance, covariance] = heads.subarray(5 * head, 5 * head + 5);
        context.lineWidth = (chosen && chosen.layer === layer && chosen.head === head ? 2.5 : 1.25) * ratio;
        context.strokeStyle = context.fillStyle = HEADS[head % HEADS.length];
        context.beginPath();
        if (dots) {
          const edge = (z, most) => Math.min(most - 4 * ratio, Math.max(4 * ratio, z));
          const at = [edge(x(col), canvas.width), edge(y(row), canvas.height)];
          context.arc(...at, 2.25 * ratio, 0, 2 * Math.PI);
          if (at[0] === x(col) && at[1] === y(row)) context.fill(); else context.stroke();
          const side = at[0] > canvas.width - 12 * ratio ? -9 : 3.5, place = [at[0] + side * ratio, at[1] - 2 * ratio];
          context.lineWidth = 2 * ratio;
          context.strokeStyle = '#fffc';
          context.strokeText(head, ...place);
          context.fillText(head, ...place);
        } else {
          const half = (colVariance - rowVariance) / 2, spread = Math.hypot(half, covariance);
          const axes = [1, -1].map(
            sign => HALF * unit * Math.sqrt(Math.max(0, (rowVariance + colVariance) / 2 + sign * spread)));
          context.ellipse(x(col), y(row), ...axes, Math.atan2(covariance, half) / 2, 0, 2 * Math.PI);
          context.stroke();
        }
      }
      context.restore();
    }
    context.strokeStyle = '#000';
    context.lineWidth = 1.25 * ratio;
    context.beginPath();
    for (const [dx, dy] of [[4 * ratio, 0], [0, 4 * ratio]]) {
      context.moveTo(x(0) - dx, y(0) - dy);
      context.lineTo(x(0) + dx, y(0) + dy);
    }
    context.stroke();
  }
}

function pause() {
  if (!player) return;
  cancelAnimationFrame(player);
  player = 0;
  update({ epoch: Math.round(state.epoch) });
}
