// Draws the page and connects its filters.

function drawHeader(plan) {
  const facts = [
    plan.machines,
    counted(plan.processes, "process", "processes"),
    plan.free ? `${counted(plan.free, "accelerator")} free` : null,
  ].filter(Boolean);
  const findings = plan.findings.length
    ? make("a", { href: "#findings", class: "chip warning" }, counted(plan.findings.length, "finding"))
    : null;
  byId("header").append(
    make("p", { class: "brand" }, "Roost plan"),
    make("h1", {}, plan.file),
    make(
      "p",
      { class: "facts" },
      make("span", { class: "chip" }, `${plan.notation} notation`),
      make("span", { class: "chip mode" }, plan.mode),
      findings,
      make("span", {}, facts.join(" · ")),
    ),
  );
}

function start() {
  const plan = readPlan(JSON.parse(byId("data").textContent));
  const view = { hidden: new Set(), nodes: null, open: new Set(), isFlat: plan.num_nodes <= UNFOLDED_NODES };
  drawHeader(plan);
  drawPhases(plan);
  drawRoutes(plan);
  drawTraffic(plan);
  drawFindings(plan);
  const details = makeDetails(plan);
  const fold = (run) => {
    if (!view.open.delete(run)) view.open.add(run);
    update();
    grid.focus();
  };
  const grid = new GridView(plan, view, details.show, fold);
  const [input, shown, unfold] = [byId("nodes"), byId("shown"), byId("unfold")];
  const overview = makeOverview(plan, view, (node) => {
    input.value = node;
    filter();
  });

  function filter() {
    const { nodes, problem } = findNodes(plan, input.value);
    view.nodes = nodes;
    update(problem);
  }
  function update(problem = "") {
    grid.update();
    overview.update();
    const part = view.nodes ? `${view.nodes.length.toLocaleString("en")} of ` : "";
    shown.textContent = problem || `${part}${counted(plan.num_nodes, "node")}`;
    shown.classList.toggle("problem", Boolean(problem));
    unfold.textContent = view.isFlat ? "fold equal nodes" : "show every node";
    unfold.hidden = Boolean(view.nodes) || plan.runs.every((run) => run.length === 1);
  }
  const labels = [...plan.groups.keys()];
  input.placeholder = labels.length ? `3, 8-15 or ${labels[0]}` : "3 or 8-15";
  input.addEventListener("input", filter);
  unfold.addEventListener("click", () => {
    view.isFlat = !view.isFlat;
    view.open.clear();
    update();
  });
  drawLegend(plan, view, update);
  update();
}

start();
