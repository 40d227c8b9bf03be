// Lines over steps, and points of evaluations.

function lineChart(container, steps, series, { label, zero = false, points = null } = {}) {
  const values = series.flatMap((one) => known(one.values)).concat(points ? points.values : []);
  if (!values.length) return emptyChart(container, "Nothing was measured yet.");
  const all = points ? [...new Set([...steps, ...points.steps])].sort((one, other) => one - other) : steps;
  const rowsOf = new Map(steps.map((step, index) => [step, index]));
  const pointsOf = new Map(points ? points.steps.map((step, index) => [step, index]) : []);
  new ChartFrame(container, all, {
    label,
    domain: domainOf(values, { zero }),
    paint(frame) {
      for (const one of series) {
        const path = pathOf(frame, steps, one.values);
        if (path) frame.svg.append(draw("path", { class: `line ${one.kind ?? ""}`, d: path, stroke: one.colour }));
      }
      if (points) frame.svg.append(draw("g", { class: "points", fill: points.colour }, ...diamonds(frame, points)));
    },
    describe(index) {
      const rows = [];
      const row = rowsOf.get(all[index]);
      const point = pointsOf.get(all[index]);
      if (row !== undefined) {
        for (const one of [...series, ...(series[0].also ?? [])]) rows.push(tipRow(one.colour, one.name, spell(one.values[row])));
      }
      if (point !== undefined) rows.push(tipRow(points.colour, points.name, points.describe(point)));
      return rows;
    },
  });
}

// A point for each number, in one line up to the next gap. A point between two gaps is closed, to be seen as a dot.
function pathOf(frame, steps, values) {
  const parts = [];
  let isOpen = false;
  values.forEach((value, index) => {
    if (!isNumber(value)) {
      isOpen = false;
      return;
    }
    const isAlone = !isOpen && !isNumber(values[index + 1]);
    parts.push(`${isOpen ? "L" : "M"}${frame.x(steps[index]).toFixed(1)},${frame.y(value).toFixed(1)}${isAlone ? "Z" : ""}`);
    isOpen = true;
  });
  return parts.join("");
}

function diamonds(frame, points) {
  const size = points.steps.length > 60 ? 3.5 : 5.5;
  return points.steps.map((step, index) => {
    const [x, y] = [frame.x(step), frame.y(points.values[index])];
    return draw("path", { d: `M${x},${y - size}L${x + size},${y}L${x},${y + size}L${x - size},${y}Z` });
  });
}
