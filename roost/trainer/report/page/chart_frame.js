// What charts over steps have in common: axes, a size that follows the page, and a line that marks the same step in all.

const MARGIN = { left: 52, right: 12, top: 8, bottom: 22 };
const FRAMES = [];

class ChartFrame {
  // `paint(frame)` draws what is inside; `describe(index)` gives the rows of the note for a step; `inset` is the room
  // before the first and after the last step, in steps.
  constructor(container, steps, { paint, describe, domain, label, format = spellTick, inset = 0 }) {
    Object.assign(this, { container, steps, paint, describe, domain, format, inset });
    this.svg = draw("svg", { role: "img", "aria-label": label });
    this.container.append(this.svg);
    this.marker = draw("line", { class: "marker", visibility: "hidden" });
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => {
      hideTip();
      FRAMES.forEach((frame) => frame.mark(null));
    });
    FRAMES.push(this);
    new ResizeObserver(() => this.resize()).observe(container);
  }

  resize() {
    const { width, height } = this.container.getBoundingClientRect();
    if (width < 1 || (width === this.width && height === this.height)) return;
    Object.assign(this, { width, height });
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.right = width - MARGIN.right;
    this.bottom = height - MARGIN.bottom;
    const [first, last] = [this.steps[0], this.steps[this.steps.length - 1]];
    this.first = first - this.inset;
    this.span = last - first + 2 * this.inset;
    this.svg.replaceChildren();
    this.axes(first, last);
    this.paint(this);
    this.marker.setAttribute("y1", MARGIN.top);
    this.marker.setAttribute("y2", this.bottom);
    this.svg.append(this.marker);
  }

  x(step) {
    const room = this.right - MARGIN.left;
    return this.span ? MARGIN.left + ((step - this.first) / this.span) * room : MARGIN.left + room / 2;
  }

  y(value) {
    const [low, high] = this.domain;
    return this.bottom - ((value - low) / (high - low)) * (this.bottom - MARGIN.top);
  }

  axes(first, last) {
    const grid = draw("g", { class: "axes" });
    const levels = ticks(...this.domain, Math.max(2, this.height / 48));
    for (const value of levels.values) {
      const y = this.y(value);
      grid.append(
        draw("line", { x1: MARGIN.left, x2: this.right, y1: y, y2: y }),
        draw("text", { x: MARGIN.left - 7, y: y + 4, "text-anchor": "end" }, this.format(value, levels.step)),
      );
    }
    const wholes = ticks(first, last, Math.max(2, this.width / 90)).values.filter(Number.isInteger);
    for (const step of wholes) {
      grid.append(draw("text", { x: this.x(step), y: this.height - 5, "text-anchor": "middle" }, step.toLocaleString("en")));
    }
    this.svg.append(grid);
  }

  point(event) {
    const left = this.svg.getBoundingClientRect().left;
    const room = this.right - MARGIN.left;
    const wanted = this.first + ((event.clientX - left - MARGIN.left) / room) * this.span;
    const index = nearest(this.steps, wanted);
    FRAMES.forEach((frame) => frame.mark(this.steps[index]));
    showTip(event.clientX, event.clientY, make("b", {}, `step ${this.steps[index].toLocaleString("en")}`), ...this.describe(index));
  }

  mark(step) {
    if (!this.width) return;
    this.marker.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step === null) return;
    this.marker.setAttribute("x1", this.x(step));
    this.marker.setAttribute("x2", this.x(step));
  }
}

// Where in ascending numbers the one closest to another is.
function nearest(numbers, wanted) {
  let [low, high] = [0, numbers.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low > 0 && wanted - numbers[low - 1] < numbers[low] - wanted ? low - 1 : low;
}

// Room for all values, a little more, and never none.
function domainOf(values, { zero = false } = {}) {
  let [low, high] = values.length ? extent(values) : [0, 1];
  if (zero) [low, high] = [Math.min(0, low), Math.max(0, high)];
  const spread = high - low || Math.abs(high) || 1;
  return [zero && low === 0 ? 0 : low - spread * 0.06, high + spread * 0.06];
}

const emptyChart = (container, words) => container.replaceWith(make("p", { class: "nothing" }, words));
