// Data, colours and the view that all pictures share.

const data = JSON.parse(document.getElementById("data").textContent);

// Marks of direction and control characters are shown, not obeyed, wherever a name or a text is.
const visible = (text) =>
  text.replace(/\n/g, "⏎").replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g,
    (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);

const make = (tag, given = {}, ...inside) => {
  const one = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name.startsWith("on")) one.addEventListener(name.slice(2), value);
    else if (name in one && typeof value !== "string") one[name] = value;
    else one.setAttribute(name, value);
  }
  const parts = inside.filter((part) => part !== null && part !== undefined);
  one.append(...parts.map((part) => (typeof part === "string" ? visible(part) : part)));
  return one;
};

const number = (value) => value.toLocaleString("en-US");
const count = (value, what) => `${number(value)} ${what}${value === 1 ? "" : "s"}`;
const signed = (value) => (value > 0 ? `+${number(value)}` : value < 0 ? `−${number(-value)}` : "0");

// --- columns: base64 of deflated bytes ---------------------------------------------------------

const inflated = async (text) => {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let at = 0; at < raw.length; at += 1) bytes[at] = raw.charCodeAt(at);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
};

const numbers = async (text) => {
  const buffer = await inflated(text);
  if (new Uint8Array(new Uint32Array([1]).buffer)[0]) return new Uint32Array(buffer);
  const view = new DataView(buffer);
  return Uint32Array.from({ length: buffer.byteLength / 4 }, (_, at) => view.getUint32(4 * at, true));
};

// A column after this script; the browser may still be reading it.
const later = async (name) => {
  if (document.readyState === "loading") await new Promise((done) => document.addEventListener("DOMContentLoaded", done, { once: true }));
  return document.getElementById(name).textContent;
};

const unpackedJson = async (text) => JSON.parse(new TextDecoder().decode(await inflated(text)));

// --- text of tokens ----------------------------------------------------------------------------

class Texts {
  constructor(pieces) { this.pieces = pieces; }

  of(id) { return this.pieces ? this.pieces[id] ?? "" : String(id); }

  // The text of some tokens, or their ids.
  join(ids) {
    return this.pieces ? Array.from(ids, (id) => this.of(id)).join("") : Array.from(ids).join(" ");
  }
}

// --- colours that any colour vision can tell apart (Okabe and Ito), each class with a pattern ------

// For kinds and sessions; blue and orange mean exact and approximate.
const COLOURS = ["#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442"];
const BLUE = "#0072b2", ORANGE = "#e69f00", GREY = "#b8b8b8", PURPLE = "#cc79a7";
const AGES = ["#fde737", "#b9b17f", "#7c7b78", "#48546d", "#00204d"]; // Cividis, the latest use first

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const scheme = matchMedia("(prefers-color-scheme: dark)");
const palette = { };
const readPalette = () => {
  const probe = make("span");
  document.body.append(probe);
  for (const name of ["ink", "faint", "paper", "line"]) {
    probe.style.color = `var(--${name})`;
    palette[name] = getComputedStyle(probe).color;
  }
  probe.remove();
};
readPalette();

const patterns = new Map();
const tile = (kind) => {
  const one = make("canvas");
  one.width = one.height = 8;
  const pen = one.getContext("2d");
  pen.strokeStyle = pen.fillStyle = "#00000098";
  pen.lineWidth = 1.3;
  pen.beginPath();
  if (kind === "hatch" || kind === "cross") for (const at of [-8, 0, 8]) { pen.moveTo(at, 8); pen.lineTo(at + 8, 0); }
  if (kind === "cross") for (const at of [-8, 0, 8]) { pen.moveTo(at, 0); pen.lineTo(at + 8, 8); }
  if (kind === "dots") { pen.arc(2, 2, 0.8, 0, 7); pen.moveTo(7, 6); pen.arc(6, 6, 0.8, 0, 7); pen.fill(); return one; }
  pen.stroke();
  return one;
};
const pattern = (pen, kind) => {
  if (!patterns.has(kind)) patterns.set(kind, tile(kind));
  return pen.createPattern(patterns.get(kind), "repeat");
};

const fill = (pen, look, x, y, width, height) => {
  if (look.colour) { pen.fillStyle = look.colour; pen.fillRect(x, y, width, height); }
  if (look.pattern && height >= 3) { pen.fillStyle = pattern(pen, look.pattern); pen.fillRect(x, y, width, height); }
  if (look.dashed) {
    pen.strokeStyle = palette.faint;
    pen.setLineDash([3, 3]);
    if (height >= 4) pen.strokeRect(x + 0.5, y + 0.5, Math.max(width - 1, 0), Math.max(height - 1, 0));
    else { pen.beginPath(); pen.moveTo(x, y + height / 2); pen.lineTo(x + width, y + height / 2); pen.stroke(); }
    pen.setLineDash([]);
  }
};

const LOOKS = {
  exact: { colour: BLUE, name: "exact" },
  approximate: { colour: ORANGE, pattern: "hatch", name: "approximate" },
  hole: { dashed: true, name: "hole: evicted, with cached blocks below" },
  dead: { pattern: "cross", name: "dead: evicted first" },
  compute: { colour: GREY, pattern: "dots", name: "computed" },
  unused: { colour: "#e8e8e8", name: "cached, not used by this prompt" },
};

// More things than colours: then patterns differ as well.
const several = (at) => ({ colour: COLOURS[at % COLOURS.length], pattern: [null, "hatch", "dots", "cross"][Math.floor(at / COLOURS.length) % 4] });

const legend = (looks) => make("div", { class: "key" }, ...looks.map((look) => {
  const sample = make("canvas", { width: 26, height: 14, "aria-hidden": "true" });
  fill(sample.getContext("2d"), look, 0, 0, 26, 14);
  return make("span", {}, sample, look.name);
}));

const FONT = "12px ui-monospace, 'DejaVu Sans Mono', monospace";
const CHARACTER = 7.3;

// Text inside a box, cut at its end.
const inside = (pen, text, x, y, width, height, colour) => {
  const most = Math.floor((width - 6) / CHARACTER);
  if (most < 2 || height < 11) return;
  const shown = visible(text.slice(0, most + 8));
  pen.fillStyle = colour;
  pen.textAlign = "left";
  pen.fillText(shown.length > most ? `${shown.slice(0, most - 1)}…` : shown, x + 3, y + height / 2);
};

// --- a picture that can be moved and zoomed -----------------------------------------------------

class View {
  // `size` is in units: tokens across, rows down (0 rows: the picture is not zoomed downwards).
  constructor(canvas, size, draw, { left = 0 } = {}) {
    Object.assign(this, { canvas, size, draw, left, x: 0, y: 0, asked: false, moved: false });
    this.pen = canvas.getContext("2d");
    new ResizeObserver(() => this.resize()).observe(canvas);
    scheme.addEventListener("change", () => { readPalette(); this.ask(); });
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.drag(event));
    canvas.addEventListener("pointerup", (event) => this.up(event));
    this.resize();
  }

  resize() {
    const { clientWidth, clientHeight } = this.canvas, ratio = devicePixelRatio || 1;
    const first = this.width === undefined;
    const whole = first || (Math.abs(this.kx - this.least()[0]) < 1e-9 && (!this.size[1] || Math.abs(this.ky - this.least()[1]) < 1e-9));
    [this.width, this.height] = [clientWidth, clientHeight];
    this.canvas.width = clientWidth * ratio;
    this.canvas.height = clientHeight * ratio;
    this.pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    if (whole) this.fit(); else this.clamp();
    if (!first) this.paint();
  }

  least() {
    return [(this.width - this.left - 4) / Math.max(this.size[0], 1), this.size[1] ? (this.height - 4) / this.size[1] : 1];
  }

  fit() { [this.kx, this.ky] = this.least(); this.ky = Math.min(this.ky, 40); this.x = this.y = 0; this.ask(); }

  clamp() {
    const [kx, ky] = this.least();
    this.kx = Math.min(Math.max(this.kx, kx), Math.max(90, kx));
    if (this.size[1]) this.ky = Math.min(Math.max(this.ky, Math.min(ky, 40)), 60);
    this.x = Math.min(Math.max(this.x, 0), Math.max(0, this.size[0] - (this.width - this.left - 4) / this.kx));
    this.y = Math.min(Math.max(this.y, 0), Math.max(0, this.size[1] - (this.height - 4) / this.ky));
    this.ask();
  }

  px(x) { return this.left + (x - this.x) * this.kx; }
  py(y) { return (y - this.y) * this.ky; }
  at(px, py) { return [this.x + (px - this.left) / this.kx, this.y + py / this.ky]; }

  zoom(factor, px = this.left + (this.width - this.left) / 2, py = this.height / 2) {
    const [x, y] = this.at(px, py);
    this.kx *= factor;
    if (this.size[1]) this.ky *= factor;
    const [kx, ky] = this.least();
    this.kx = Math.min(Math.max(this.kx, kx), Math.max(90, kx));
    if (this.size[1]) this.ky = Math.min(Math.max(this.ky, Math.min(ky, 40)), 60);
    this.x = x - (px - this.left) / this.kx;
    this.y = y - py / this.ky;
    this.clamp();
  }

  pan(dx, dy) { this.x += dx / this.kx; this.y += dy / this.ky; this.clamp(); }

  // Show a part; `tight` zooms to it, else the view moves only as far as it must.
  show([x0, x1], [y0, y1], tight) {
    const wide = this.width - this.left;
    if (tight) {
      this.kx = wide / Math.max((x1 - x0) * 1.3, 8);
      if (this.size[1]) this.ky = this.height / Math.max((y1 - y0) * 1.3, 12);
      this.clamp();
      this.x = (x0 + x1) / 2 - wide / 2 / this.kx;
      this.y = (y0 + y1) / 2 - this.height / 2 / this.ky;
    } else {
      if (x0 < this.x || x1 > this.x + wide / this.kx) this.x = x0 - wide / 8 / this.kx;
      if (y0 < this.y || y1 > this.y + this.height / this.ky) this.y = y0 - this.height / 3 / this.ky;
    }
    this.clamp();
  }

  ask() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => { this.asked = false; this.paint(); });
  }

  paint() {
    const began = performance.now();
    this.pen.clearRect(0, 0, this.width, this.height);
    this.pen.font = FONT;
    this.pen.textBaseline = "middle";
    this.pen.lineWidth = 1;
    this.draw(this.pen, this);
    this.took = performance.now() - began;
    this.canvas.dataset.drawMs = this.took.toFixed(1);
  }

  wheel(event) {
    // A picture without rows is part of a page that scrolls.
    if (!this.size[1] && !event.ctrlKey && document.activeElement !== this.canvas) return;
    event.preventDefault();
    const box = this.canvas.getBoundingClientRect();
    if (event.shiftKey) this.pan(event.deltaY || event.deltaX, 0);
    else this.zoom(Math.exp(-event.deltaY / 400), event.clientX - box.left, event.clientY - box.top);
  }

  down(event) { this.canvas.setPointerCapture(event.pointerId); this.from = [event.clientX, event.clientY]; this.moved = false; }

  drag(event) {
    if (!this.from) return;
    const [dx, dy] = [event.clientX - this.from[0], event.clientY - this.from[1]];
    if (!this.moved && Math.hypot(dx, dy) < 4) return;
    this.moved = true;
    this.from = [event.clientX, event.clientY];
    this.pan(-dx, -dy);
  }

  up(event) {
    if (this.from && !this.moved && this.pick) {
      const box = this.canvas.getBoundingClientRect();
      this.pick(...this.at(event.clientX - box.left, event.clientY - box.top));
    }
    this.from = null;
  }

  // Keys that every picture has; true if the key was one of them.
  key(event) {
    const step = 80;
    const shifted = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] };
    if (event.shiftKey && shifted[event.key]) this.pan(...shifted[event.key]);
    else if (event.key === "+" || event.key === "=") this.zoom(1.5);
    else if (event.key === "-") this.zoom(1 / 1.5);
    else if (event.key === "0") this.fit();
    else return false;
    event.preventDefault();
    return true;
  }
}

const zoomButtons = (view) => [
  make("button", { type: "button", id: "closer", onclick: () => view().zoom(1.5) }, "Zoom in"),
  make("button", { type: "button", id: "further", onclick: () => view().zoom(1 / 1.5) }, "Zoom out"),
  make("button", { type: "button", id: "everything", onclick: () => view().fit() }, "Everything"),
];

// Positions in tokens above a picture.
const axis = (pen, view, y) => {
  const step = [1, 2, 5, 10, 20, 50].flatMap((one) => [1, 100, 1e4, 1e6].map((by) => one * by))
    .sort((a, b) => a - b).find((one) => one * view.kx >= 70) ?? 1e8;
  pen.fillStyle = palette.faint;
  pen.strokeStyle = palette.line;
  pen.textAlign = "left";
  for (let at = Math.ceil(view.x / step) * step; view.px(at) < view.width; at += step) {
    pen.beginPath(); pen.moveTo(view.px(at), y); pen.lineTo(view.px(at), y + 5); pen.stroke();
    pen.fillText(number(at), view.px(at) + 3, y + 6);
  }
};

// The first picture is on the screen when the frame after it begins.
const painted = () => requestAnimationFrame(() => setTimeout(() => {
  performance.measure("kvtrie-first-paint", { start: 0, end: performance.now() });
  document.documentElement.dataset.firstPaint = performance.now().toFixed(0);
}));
