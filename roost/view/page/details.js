// The panel with the processes of the selected cell and their start settings.

function makeDetails(plan) {
  const panel = byId("details");
  const close = () => panel.replaceChildren(...introduction());
  close();
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
  });
  return {
    show: (place) => draw(plan, panel, place, close),
    close,
  };

  function introduction() {
    panel.classList.remove("open");
    return [
      make("h2", {}, "Processes"),
      make(
        "p",
        { class: "dim" },
        "Pick a cell to see the processes there: their ranks, devices, environment and interpreter. " +
          "With the keyboard: Tab to the grid, arrows, Enter.",
      ),
    ];
  }

  function draw(plan, panel, place, close) {
    const node = nodeOf(place.run, place.position);
    const closing = make("button", { type: "button", class: "close", "aria-label": "close" }, "×");
    closing.addEventListener("click", close);
    const host = plan.hosts[node] ? ` · ${plan.hosts[node]}` : "";
    const about = [...place.run.layout.groups, place.run.layout.machine].filter(Boolean).join(" · ");
    const cards = place.holders.flatMap((holder) => cardsOf(plan, place, holder, node));
    panel.classList.add("open");
    panel.replaceChildren(
      closing,
      make("h2", {}, `node ${node}, ${place.title}`),
      make("p", { class: "dim" }, `${about}${host}`),
      ...(place.length > 1 ? [stepper(place, (position) => draw(plan, panel, { ...place, position }, close))] : []),
      ...(cards.length ? cards : [make("p", {}, "No process holds it.")]),
    );
  }
}

// A field that selects one node of a folded row.
function stepper(place, onChange) {
  const { run } = place;
  const input = make("input", {
    type: "number",
    min: run.first,
    max: nodeOf(run, run.length - 1),
    step: run.step,
    value: nodeOf(run, place.position),
  });
  input.addEventListener("change", () => {
    const position = Math.round((Number(input.value) - run.first) / run.step);
    onChange(Math.max(0, Math.min(run.length - 1, position)));
  });
  return make("label", { class: "stepper" }, `one of ${counted(run.length, "node")} alike: `, input);
}

// Processes with equal start settings and devices share a card.
function cardsOf(plan, place, holder, node) {
  const processes = ranksOf(place.run, place.position, holder).map((rank) =>
    processOf(plan, holder.component, rank, node),
  );
  const alike = new Map();
  for (const process of processes) {
    const key = `${process.home} ${process.start} ${JSON.stringify(process.devices)}`;
    alike.set(key, [...(alike.get(key) ?? []), process]);
  }
  return [...alike.values()].map((group) => card(plan, group, place, node));
}

function card(plan, processes, place, node) {
  const [first] = processes;
  const component = plan.components[first.component];
  const ranks = spell(processes.map((process) => process.rank));
  const many = processes.length > 1;
  const rows = [
    ["rank", `${ranks} of ${component.size.toLocaleString("en")}`],
    ["runs on", `node ${first.home}${plan.hosts[first.home] ? ` (${plan.hosts[first.home]})` : ""}`],
    ["local rank", `${spell(processes.map((process) => process.local))} of ${first.localSize}`],
    [
      "devices",
      first.devices.length
        ? first.devices
            .map(
              ([at, kind, indices]) =>
                `${at === first.home ? "" : `node ${at}: `}${kind ? `${kind} ` : ""}${spell(indices)}`,
            )
            .join("; ")
        : "none",
    ],
    ["node group", first.group],
    ["interpreter", first.interpreter ?? "default"],
    component.parallel ? ["parallel", component.parallel] : null,
    component.managed_by ? ["started by", `${component.managed_by} 0`] : null,
  ].filter(Boolean);
  return make(
    "article",
    { class: "process", "--colour": component.colour },
    make(
      "h3",
      {},
      swatch(component),
      ` ${component.name} ${ranks}`,
      many ? make("small", {}, ` ${processes.length} processes`) : null,
    ),
    component.written === component.name ? null : make("p", { class: "dim" }, `written as ${component.written}`),
    pairs(rows),
    first.env.length ? make("h4", {}, "environment") : null,
    first.env.length ? variables(first.env) : null,
    ...configsOf(plan, first).flatMap(([name, config]) => [make("h4", {}, name), variables(config)]),
  );
}

function configsOf(plan, process) {
  return process.devices.flatMap(([node, kind, [index]]) => {
    const config = kind && plan.configs[node]?.[kind]?.[index];
    return config ? [[`${kind} ${index} as declared`, config]] : [];
  });
}

function variables(rows) {
  return make(
    "dl",
    { class: "code" },
    ...rows.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))),
  );
}

function pairs(rows) {
  return make("dl", {}, ...rows.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, String(value))]));
}
