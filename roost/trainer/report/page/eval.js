// The page of an evaluation: a table of sets and tags, and completions.

function start() {
  const found = JSON.parse(byId("data").textContent);
  byId("header").append(make("p", { class: "brand" }, "Roost evaluation"), make("h1", {}, found.model));
  const names = [...new Set(found.tables.flatMap(([, rows]) => rows.flatMap(([, figures]) => Object.keys(figures))))];
  const row = (kind, cells) => make("tr", {}, ...cells.map((cell) => make(kind, {}, cell)));
  byId("results").append(
    row("th", ["set", "tag", ...names]),
    ...found.tables.flatMap(([set, rows]) =>
      rows.map(([tag, figures]) => row("td", [set, tag || "all", ...names.map((name) => (name in figures ? spell(figures[name]) : ""))])),
    ),
  );
  byId("shown").textContent = `${found.completions.length} of ${found.total}`;
  byId("completions").append(...found.completions.map(drawCompletion));
}

function drawCompletion(one) {
  const head = `${one.correct ? "✓" : "✗"} ${one.set}${one.tag ? ` (${one.tag})` : ""}: ${one.task}`;
  return make(
    "details",
    { class: "card" },
    make("summary", {}, head, make("span", { class: "dim" }, ` reward ${spell(one.reward)}, ${one.tokens} tokens, ${one.finish}`)),
    make("pre", {}, one.completion),
  );
}

start();
