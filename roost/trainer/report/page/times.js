// Where the time of the steps went.

function drawTimes(run) {
  const whole = run.series.get("time/step");
  const parts = run.phases.map((phase) => ({ name: phase.name, values: phase.seconds, colour: phase.colour }));
  if (whole) {
    const rest = whole.map((seconds, index) => Math.max(0, (seconds ?? 0) - sum(parts.map((part) => part.values[index]))));
    if (sum(rest) > 0.001 * sum(known(whole))) parts.push({ name: "other", values: rest, colour: "var(--rest)" });
  }
  // Phases that run side by side add up to more than the step took.
  const total = sum(known(whole ?? []));
  const isOverlapping = whole && sum(parts.map((part) => sum(part.values))) > 1.02 * total;
  const also = isOverlapping ? [{ name: "the whole step", values: whole, colour: "var(--ink)" }] : [];
  if (isOverlapping) within("times", ".dim").textContent = "seconds of each step, by phase; phases ran side by side, the line is the step";
  stackedChart(within("times", ".chart"), run.steps, parts, { label: "Seconds of each step by phase", also });
  const reference = total || sum(parts.map((part) => sum(part.values)));
  within("times", ".totals").append(
    ...parts.map((part) =>
      make(
        "tr",
        {},
        make("th", { scope: "row" }, swatch(part.colour), part.name),
        make("td", {}, spellSeconds(sum(part.values))),
        make("td", { class: "dim" }, reference ? percent(sum(part.values) / reference) : ""),
      ),
    ),
  );
}
