// @ts-check
// A part of the page as a picture: backgrounds, pictures and lines of text, each where it is on the screen.
import { contextOf, element } from './drawing.js';

/** The lines of a text as the page breaks them: a line ends where the next character lies lower.
 * @param {Text} text @returns {{ line: string, box: DOMRect }[]} */
function linesOf(text) {
  const range = document.createRange(), lines = /** @type {{ line: string, box: DOMRect }[]} */ ([]);
  for (let i = 0; i < text.length; i++) {
    range.setStart(text, i);
    range.setEnd(text, i + 1);
    const box = range.getBoundingClientRect(), last = lines[lines.length - 1];
    if (!box.width && !text.data[i].trim()) continue;  // space that the page folds
    if (last && box.top <= last.box.top + 2) last.line += text.data[i];
    else lines.push({ line: text.data[i], box });
  }
  return lines;
}

/** @param {CanvasRenderingContext2D} context @param {Element} node */
function paintNode(context, node) {
  const { left, top, width, height } = node.getBoundingClientRect(), style = getComputedStyle(node);
  if (!width) return;
  context.fillStyle = style.backgroundColor;
  context.fillRect(left, top, width, height);
  context.filter = style.filter;
  if (node instanceof HTMLImageElement || node instanceof HTMLCanvasElement) {
    context.drawImage(node, left, top, width, height);
  }
  context.filter = 'none';
  context.fillStyle = style.color;
  context.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
  if (node.matches('[aria-pressed=true]')) context.strokeRect(left - 2, top - 2, width + 4, height + 4);
  for (const text of node.childNodes) {
    if (!(text instanceof Text)) continue;
    for (const { line, box } of linesOf(text)) context.fillText(line, box.left, (box.top + box.bottom) / 2);
  }
}

/** @param {Element} view @returns {HTMLCanvasElement} */
export function paint(view) {
  const ratio = Math.max(2, devicePixelRatio), margin = 16, { left, top, width, height } = view.getBoundingClientRect();
  const [across, down] = [width, height].map(side => side + 2 * margin);
  const canvas = element('canvas', { width: Math.ceil(across * ratio), height: Math.ceil(down * ratio) });
  const context = contextOf(canvas);
  context.scale(ratio, ratio);
  context.fillStyle = getComputedStyle(document.body).backgroundColor;
  context.fillRect(0, 0, across, down);
  context.translate(margin - left, margin - top);
  context.imageSmoothingEnabled = false;
  context.textBaseline = 'middle';
  for (const node of view.querySelectorAll('*')) paintNode(context, node);
  return canvas;
}
