// States of components by phase on each class of devices, and their memory.

function drawPhases(plan) {
  const section = byId("phases");
  section.append(make("h2", { id: "phases-title" }, "What runs when"));
  const note = plan.is_async
    ? "Generation goes on while the learner learns; the phases below overlap."
    : "One training step, phase after phase.";
  section.append(make("p", { class: "dim" }, note));
  section.append(...plan.classes.map((part) => drawClass(plan, part)));
}

function drawClass(plan, part) {
  const head = make("tr", {}, make("td", {}), ...plan.phases.map((phase) => make("th", { scope: "col" }, phase)));
  const body = part.rows.map(([number, cells]) => {
    const component = plan.components[number];
    return make(
      "tr",
      { "data-component": number },
      make("th", { scope: "row" }, make("div", {}, swatch(component), component.name)),
      ...cells.map((cell) => make("td", {}, stateBar(component, cell))),
    );
  });
  if (part.memory.length) body.push(memoryRow(plan, part));
  return make(
    "article",
    { class: "class" },
    make(
      "header",
      {},
      make("h3", {}, part.decision ? part.title : "without an accelerator"),
      make("span", { class: "dim" }, part.machine),
      part.decision ? make("span", { class: `decision ${part.decision}` }, part.decision) : null,
      part.reason ? make("span", { class: "dim reason" }, part.reason) : null,
    ),
    make("table", { class: "timeline" }, make("thead", {}, head), make("tbody", {}, ...body)),
  );
}

function stateBar(component, [state, words, onDevice, onHost]) {
  const sizes = [];
  if (onDevice) sizes.push(`${onDevice.toFixed(1)} GiB`);
  if (onHost) sizes.push(`host ${onHost.toFixed(1)}`);
  return make(
    "div",
    { class: `state ${state}`, "--colour": component.colour, "--on": component.ink },
    make("span", {}, words),
    sizes.length ? make("small", {}, sizes.join(", ")) : null,
  );
}

function memoryRow(plan, part) {
  const bars = part.memory.map(([words, total, inFlight, isWhole], phase) => {
    const parts = part.rows.map(([number, cells]) => [plan.components[number], cells[phase][2] ?? 0]);
    const known = parts.reduce((sum, [, size]) => sum + size, inFlight);
    const scale = Math.max(total ?? 0, known) || 1;
    const segment = (size, attributes) => make("i", { ...attributes, "--share": `${(100 * size) / scale}%` });
    const segments = parts
      .filter(([, size]) => size > 0)
      .map(([component, size]) =>
        segment(size, { "--colour": component.colour, title: `${component.name} ${size.toFixed(1)} GiB` }),
      );
    if (inFlight > 0)
      segments.push(segment(inFlight, { class: "flight", title: `weights in flight ${inFlight.toFixed(1)} GiB` }));
    const isOver = total !== null && known > total;
    return make(
      "td",
      {},
      make("div", { class: `memory${isWhole ? "" : " unknown"}${isOver ? " over" : ""}` }, ...segments),
      make("small", {}, words),
    );
  });
  return make("tr", { class: "use" }, make("th", { scope: "row" }, "memory of each"), ...bars);
}
