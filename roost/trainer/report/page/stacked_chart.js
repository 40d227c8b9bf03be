// Bars of seconds over steps, made of parts. Where there are more steps than room, a bar is the mean of several.

function stackedChart(container, steps, parts, { label, also = [] }) {
  const heights = steps.map((_, index) => sum(parts.map((part) => part.values[index])));
  if (!heights.some((height) => height > 0)) return emptyChart(container, "No times were measured yet.");
  const lines = also.flatMap((one) => known(one.values));
  new ChartFrame(container, steps, {
    label,
    format: (value, step) => `${spellTick(value, step)} s`,
    inset: 0.5,
    domain: domainOf([...heights, ...lines], { zero: true }),
    paint(frame) {
      const room = frame.right - MARGIN.left;
      const together = Math.max(1, Math.ceil(steps.length / (room / 5)));
      const width = Math.min(46, (room / Math.ceil(steps.length / together)) * 0.82);
      const group = draw("g", { class: "stack" });
      for (let start = 0; start < steps.length; start += together) {
        const end = Math.min(steps.length, start + together);
        const x = (frame.x(steps[start]) + frame.x(steps[end - 1])) / 2 - width / 2;
        let base = 0;
        for (const part of parts) {
          const height = mean(part.values.slice(start, end));
          if (height > 0) group.append(slab(frame, x, width, base, height, part.colour));
          base += height;
        }
      }
      frame.svg.append(group);
      for (const one of also) {
        frame.svg.append(draw("path", { class: "line thin", d: pathOf(frame, steps, one.values), stroke: one.colour }));
      }
    },
    describe(index) {
      const rows = [...parts].reverse().map((part) => tipRow(part.colour, part.name, spellSeconds(part.values[index])));
      return [...rows, ...also.map((one) => tipRow(one.colour, one.name, spellSeconds(one.values[index])))];
    },
  });
}

function slab(frame, x, width, base, height, colour) {
  const [low, high] = [frame.y(base), frame.y(base + height)];
  const left = Math.max(MARGIN.left, x);
  const right = Math.min(frame.right, x + width);
  return draw("rect", { x: left, y: high, width: Math.max(0.5, right - left), height: Math.max(0.5, low - high), fill: colour });
}
