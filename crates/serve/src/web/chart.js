// Lines over steps or time, drawn as SVG. What stands at a place is told above the lines, for the pointer and for the
// arrow keys.

import { h, svg } from "./dom.js";

const MARGIN = { left: 46, right: 14, top: 10, bottom: 26 };

export class Chart {
  // `series` are `{name, smooth}`; the axes reach `reachX` and `reachY` at least.
  constructor(label, series, { tellX = (x) => `step ${x}`, tellY = shortened, reachY = [], reachX = [], empty = "Nothing yet." } = {}) {
    Object.assign(this, { series, tellX, tellY, reachY, reachX, points: series.map(() => []), xs: [], at: null });
    this.values = series.map(() => h("output"));
    this.place = h("span.place.quiet");
    const keys = series.map(({ name }, index) => h(`span.key.line-${index}`, h("i"), name, " ", this.values[index]));
    this.plot = svg("svg.plot", {
      tabindex: 0,
      role: "slider",
      "aria-label": label,
      onpointermove: (event) => this.point(event),
      onpointerdown: (event) => this.point(event),
      onpointerleave: () => this.move(null),
      onblur: () => this.move(null),
      onkeydown: (event) => this.key(event),
    });
    this.nothing = h("p.nothing.quiet", empty);
    this.element = h("div.chart", h("div.legend", keys, this.place), this.plot, this.nothing);
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  // Shows these points, a list of `[x, y]` by rising x for each series.
  set(points) {
    this.points = points;
    this.xs = [...new Set(points.flat().map(([x]) => x))].sort((a, b) => a - b);
    this.draw();
  }

  draw() {
    const { width, height } = this.plot.getBoundingClientRect();
    this.nothing.hidden = this.xs.length > 0;
    this.plot.replaceChildren();
    if (!width || !this.xs.length) return;
    const right = width - MARGIN.right;
    const bottom = height - MARGIN.bottom;
    const [first, last] = [Math.min(this.xs[0], ...this.reachX), Math.max(this.xs.at(-1), ...this.reachX)];
    this.x = scale(first, last > first ? last : first + 1, MARGIN.left, right);
    const rows = steps(...this.range(), height / 50);
    const y = scale(rows.low, rows.high, bottom, MARGIN.top);
    for (const value of rows.values) {
      const at = y(value);
      this.plot.append(svg("line.grid", { x1: MARGIN.left, x2: right, y1: at, y2: at }));
      this.plot.append(svg("text.end", { x: MARGIN.left - 8, y: at + 4 }, this.tellY(value)));
    }
    for (const value of steps(first, last, width / 90).values) {
      if (value < first || value > last) continue;
      this.plot.append(svg("text.middle", { x: this.x(value), y: height - 6 }, this.tellX(value).replace("step ", "")));
    }
    this.points.forEach((points, index) => {
      const { smooth } = this.series[index];
      const place = ([x, value]) => `${this.x(x).toFixed(1)},${y(value).toFixed(1)}`;
      const line = (name, shown) => svg(`polyline.${name}.line-${index}`, { points: shown.map(place).join(" ") });
      const thin = thinned(points, width);
      const many = smooth && points.length > 24;
      if (many) this.plot.append(line("faint", thin));
      this.plot.append(line("curve", many ? smoothed(thin) : thin));
      if (smooth === undefined || points.length > 40) return;
      for (const [x, value] of points) {
        this.plot.append(svg(`circle.line-${index}`, { cx: this.x(x), cy: y(value), r: 2.5 }));
      }
    });
    this.cursor = svg("line.cursor", { y1: MARGIN.top, y2: bottom });
    this.plot.append(this.cursor);
    this.tell();
  }

  // From where to where the values go; a curve far above 0 is not pressed flat by an axis that begins there.
  range() {
    const values = this.points.flat().map(([, value]) => value).concat(this.reachY);
    const high = values.reduce((most, value) => Math.max(most, value), -Infinity);
    const low = values.reduce((least, value) => Math.min(least, value), Infinity);
    if (low >= 0 && low < high / 2) return [0, high];
    return low < high ? [low, high] : [low - 0.5, high + 0.5];
  }

  point({ clientX }) {
    if (!this.xs.length || !this.x) return;
    const at = clientX - this.plot.getBoundingClientRect().left;
    const away = (index) => Math.abs(this.x(this.xs[index]) - at);
    let nearest = 0;
    for (let index = 1; index < this.xs.length; index++) if (away(index) < away(nearest)) nearest = index;
    this.move(nearest);
  }

  key(event) {
    const last = this.xs.length - 1;
    const at = this.at ?? last;
    const page = Math.max(1, Math.round(last / 10));
    const to = {
      ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1,
      PageDown: at - page, PageUp: at + page, Home: 0, End: last,
    }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.move(Math.max(0, Math.min(last, to)));
  }

  move(index) {
    this.at = index;
    if (this.xs.length) this.tell();
  }

  // What stands at the cursor, or last.
  tell() {
    this.at = this.at === null ? null : Math.min(this.at, this.xs.length - 1);
    const x = this.at === null ? this.xs.at(-1) : this.xs[this.at];
    const told = this.points.map((points, index) => {
      const [, value] = points.findLast((point) => point[0] <= x) ?? [];
      const text = value === undefined ? "–" : this.tellY(value);
      this.values[index].textContent = text;
      return `${this.series[index].name} ${text}`;
    });
    this.place.textContent = this.tellX(x);
    this.cursor?.setAttribute("transform", `translate(${this.x ? this.x(x) : 0})`);
    this.cursor?.classList.toggle("hidden", this.at === null);
    const aria = { valuemin: this.xs[0], valuemax: this.xs.at(-1), valuenow: x, valuetext: [this.tellX(x), ...told].join(", ") };
    for (const name in aria) this.plot.setAttribute(`aria-${name}`, aria[name]);
  }
}

export function shortened(value) {
  if (Math.abs(value) >= 10_000) return Intl.NumberFormat("en", { notation: "compact" }).format(value);
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : Math.abs(value) >= 0.1 ? 2 : 3;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

function scale(low, high, from, to) {
  return (value) => from + ((value - low) / (high - low)) * (to - from);
}

// Round values from `low` to `high`, about this many.
function steps(low, high, number) {
  const rough = Math.max((high - low) / Math.max(2, number), Number.MIN_VALUE);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const [first, last] = [Math.floor(low / step), Math.ceil(high / step)];
  const values = [];
  for (let index = first; index <= last; index++) values.push(Number((index * step).toPrecision(12)));
  return { low: values[0], high: values.at(-1), values };
}

// No more points than can be seen, each the mean of its neighbours.
function thinned(points, width) {
  const group = Math.ceil(points.length / width);
  if (group < 2) return points;
  const found = [];
  for (let index = 0; index < points.length; index += group) {
    const some = points.slice(index, index + group);
    found.push([0, 1].map((part) => some.reduce((sum, point) => sum + point[part], 0) / some.length));
  }
  return found;
}

// The mean of as many points before as after, so that the line lags behind nowhere; at the ends there are fewer.
function smoothed(points) {
  const reach = Math.ceil(points.length / 30);
  return points.map(([x], index) => {
    const near = points.slice(Math.max(0, index - reach), index + reach + 1);
    return [x, near.reduce((sum, [, value]) => sum + value, 0) / near.length];
  });
}
