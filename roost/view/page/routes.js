// Weight routes to each engine, and traffic between the ranks of learners.

function drawRoutes(plan) {
  if (!plan.routes.length) return byId("routes").remove();
  byId("routes").append(
    make("h2", { id: "routes-title" }, "How new weights travel"),
    ...plan.routes.map((route) => drawRoute(plan, route)),
  );
}

function drawRoute(plan, route) {
  const component = plan.components[route.component];
  const slug = (reach) => reach.replaceAll(" ", "-");
  const bar = route.reaches.map(([reach, count]) =>
    make("i", { class: slug(reach), "--share": `${(100 * count) / route.shards}%`, title: `${count} ${reach}` }),
  );
  const rows = route.reaches.map(([reach, count, transport]) =>
    make(
      "li",
      {},
      make("i", { class: `key ${slug(reach)}` }),
      make("b", {}, `${count.toLocaleString("en")} ${reach}`),
      make("span", { class: "dim" }, ` by ${transport}`),
    ),
  );
  return drawShares(
    component,
    `takes ${counted(route.shards, "shard")}`,
    bar,
    rows,
    route.without_source
      ? make(
          "p",
          { class: "warning" },
          `${counted(route.without_source, "shard")} of weights that no learner process holds`,
        )
      : null,
    route.disk_note ? make("p", { class: "dim" }, route.disk_note) : null,
  );
}

function drawTraffic(plan) {
  if (!plan.traffic.length) return byId("traffic").remove();
  byId("traffic").append(
    make("h2", { id: "traffic-title" }, "What learners send"),
    ...plan.traffic.map((traffic) => drawSent(plan.components[traffic.component], traffic)),
  );
}

function drawSent(component, { sent, tokens }) {
  const total = sent.reduce((sum, [, size]) => sum + size, 0);
  const slug = (name) => name.split(" ")[0];
  const gigabytes = (size) => `${Number((size / 1e9).toPrecision(3))} GB`;
  const bar = sent.map(([name, size]) =>
    make("i", { class: slug(name), "--share": `${(100 * size) / total}%`, title: `${name} ${gigabytes(size)}` }),
  );
  const rows = sent.map(([name, size]) =>
    make(
      "li",
      {},
      make("i", { class: `key ${slug(name)}` }),
      make("b", {}, gigabytes(size)),
      make("span", { class: "dim" }, ` ${name}`),
    ),
  );
  return drawShares(component, `from each rank per micro-batch of ${counted(tokens, "token")}`, bar, rows);
}

function drawShares(component, about, bar, rows, ...more) {
  return make(
    "article",
    { class: "route" },
    make("h3", {}, swatch(component), ` ${component.name}`, make("small", { class: "dim" }, ` ${about}`)),
    make("div", { class: "reach" }, ...bar),
    make("ul", {}, ...rows),
    ...more,
  );
}
