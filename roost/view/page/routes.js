// How the learner's weights reach each engine.

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
  return make(
    "article",
    { class: "route" },
    make(
      "h3",
      {},
      swatch(component),
      ` ${component.name}`,
      make("small", { class: "dim" }, ` takes ${counted(route.shards, "shard")}`),
    ),
    make("div", { class: "reach" }, ...bar),
    make("ul", {}, ...rows),
    route.without_source
      ? make(
          "p",
          { class: "warning" },
          `${counted(route.without_source, "shard")} of weights that no learner process holds`,
        )
      : null,
  );
}
