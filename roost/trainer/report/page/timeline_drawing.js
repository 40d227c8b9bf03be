// The lanes of the trace on a canvas: twenty thousand bars are too many for elements.

const LEVEL = 15; // pixels of a level of spans
const GAP = 5; // between lanes
const AXIS = 34;
const NODE = 20; // above the lanes of a node, for its name
const FIELDS = 6; // numbers of a bar: level, start, length, name, spans, whether it waits

class LaneDrawing {
  constructor(run, canvas) {
    this.run = run;
    this.canvas = canvas;
    this.pen = canvas.getContext("2d");
    let top = AXIS;
    this.lanes = run.trace.lanes.map((lane, index, all) => {
      if (lane.node !== all[index - 1]?.node) top += NODE;
      const levels = 1 + lane.bars.reduce((most, value, at) => (at % FIELDS === 0 && value > most ? value : most), 0);
      const made = { ...lane, top, height: levels * LEVEL + GAP, colours: this.coloursOf(lane) };
      top += made.height;
      return made;
    });
    this.height = top;
  }

  // A lane of a process has its component's colour; the parts of a device's lane have that of who used it.
  coloursOf(lane) {
    const component = lane.name.replace(/,? lane \d+$/, "").replace(/ \d+$/, "");
    const of = (name) => this.run.colours.get(name) ?? { colour: "#8a8f98", ink: "#14171c" };
    return lane.is_device ? (name) => of(name.split(" + ")[0]) : () => of(component);
  }

  draw(from, to) {
    const scale = window.devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    this.canvas.width = this.width * scale;
    this.canvas.height = this.height * scale;
    this.canvas.style.height = `${this.height}px`;
    const style = getComputedStyle(document.documentElement);
    this.theme = Object.fromEntries(["ink", "dim", "line", "card", "wait"].map((name) => [name, style.getPropertyValue(`--${name}`)]));
    this.from = from;
    this.to = to;
    this.pen.setTransform(scale, 0, 0, scale, 0, 0);
    this.pen.clearRect(0, 0, this.width, this.height);
    this.pen.font = "11px system-ui, sans-serif";
    this.pen.textBaseline = "middle";
    this.drawAxis();
    let drawn = 0;
    for (const lane of this.lanes) drawn += this.drawLane(lane);
    return drawn;
  }

  x(time) {
    return ((time - this.from) / (this.to - this.from)) * this.width;
  }

  drawAxis() {
    const { pen, theme } = this;
    for (const seconds of ticks(this.from / 1e6, this.to / 1e6, Math.max(2, this.width / 110)).values) {
      const x = this.x(seconds * 1e6);
      pen.fillStyle = theme.line;
      pen.fillRect(x, AXIS - 6, 1, this.height);
      pen.fillStyle = theme.dim;
      pen.fillText(seconds === 0 ? "0" : spellSeconds(seconds), Math.min(x + 3, this.width - 46), 8);
    }
    let free = -Infinity;
    this.run.times.forEach((time, index) => {
      if (!isNumber(time)) return;
      const x = this.x((time - this.run.trace.start) * 1e6);
      if (x < 0 || x > this.width) return;
      pen.fillStyle = theme.ink;
      pen.globalAlpha = 0.35;
      pen.fillRect(x, AXIS - 10, 1, 8);
      pen.globalAlpha = 1;
      const words = `step ${this.run.steps[index]}`;
      const left = x - pen.measureText(words).width - 4;
      if (left < Math.max(0, free)) return;
      pen.fillStyle = theme.dim;
      pen.fillText(words, left, AXIS - 11);
      free = x + 8;
    });
  }

  drawLane(lane) {
    const { pen, theme } = this;
    const ends = []; // the pixel up to which each level is full
    let drawn = 0;
    for (let at = 0; at < lane.bars.length; at += FIELDS) {
      const [level, start, length, name, , isWait] = lane.bars.slice(at, at + FIELDS);
      if (start > this.to || start + length < this.from) continue;
      const left = Math.max(0, this.x(start));
      const right = Math.min(this.width, Math.max(this.x(start + length), left + 0.7));
      if (right <= (ends[level] ?? -1)) continue;
      ends[level] = right;
      drawn += 1;
      const { colour, ink } = lane.colours(this.run.trace.names[name]);
      pen.globalAlpha = 1;
      pen.fillStyle = theme.card;
      const y = lane.top + level * LEVEL;
      if (level) pen.fillRect(left, y, right - left, LEVEL - 1);
      pen.globalAlpha = isWait ? 1 : Math.max(0.4, 1 - 0.22 * level);
      pen.fillStyle = isWait ? theme.wait : colour;
      pen.fillRect(left, y, right - left - (right - left > 3 ? 0.6 : 0), LEVEL - 1);
      if (right - left > 34) this.label(this.run.trace.names[name], left, right, y, isWait || level ? theme.ink : ink);
    }
    pen.globalAlpha = 1;
    return drawn;
  }

  label(words, left, right, y, colour) {
    this.pen.globalAlpha = 1;
    this.pen.fillStyle = colour;
    const letters = Math.floor((right - left - 8) / 6);
    this.pen.fillText(words.length > letters ? `${words.slice(0, Math.max(1, letters - 1))}…` : words, left + 4, y + LEVEL / 2);
  }

  // The bar at a place of the canvas; of those inside each other the innermost.
  find(x, y) {
    const lane = this.lanes.find((one) => y >= one.top && y < one.top + one.height);
    if (!lane) return null;
    const level = Math.floor((y - lane.top) / LEVEL);
    const time = this.from + (x / this.width) * (this.to - this.from);
    const slack = (this.to - this.from) / this.width;
    for (let at = 0; at < lane.bars.length; at += FIELDS) {
      const [its, start, length, name, spans, isWait] = lane.bars.slice(at, at + FIELDS);
      if (its === level && time >= start - slack && time <= start + length + slack) {
        const words = this.run.trace.names[name];
        return { lane, start, length, spans, isWait, name: words, colour: lane.colours(words).colour };
      }
    }
    return null;
  }
}
