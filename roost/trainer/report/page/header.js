// The head of the page: what ran, how long, and how much better it got.

function drawHeader(run) {
  const times = known(run.times);
  const chips = [
    run.mode ? make("span", { class: "chip mode" }, run.mode) : null,
    run.machines ? make("span", { class: "chip" }, run.machines) : null,
    make("span", { class: "chip", id: "step-count" }, counted(run.steps.length, "step")),
    run.duration === null ? null : make("span", { class: "chip" }, spellSeconds(run.duration)),
    times.length ? make("span", { class: "dim" }, `until ${spellDate(times[times.length - 1])}`) : null,
  ];
  byId("header").append(
    make("p", { class: "brand" }, "Roost run"),
    make("h1", {}, run.name),
    make("p", { class: "facts" }, ...chips.filter(Boolean)),
    make("div", { class: "tiles" }, ...tiles(run)),
  );
}

function tiles(run) {
  const losses = known(run.series.get("loss/supervised") ?? []);
  const rewards = run.series.get("reward/mean") ?? [];
  const rated = rewards.map((reward, index) => ({ reward, step: run.steps[index] })).filter((one) => isNumber(one.reward));
  const made = [];
  if (rated.length) {
    const [first, last] = [rated[0], rated[rated.length - 1]];
    const best = rated.reduce((one, other) => (other.reward > one.reward ? other : one));
    made.push(
      tile("first reward", spell(first.reward), `step ${first.step}`),
      tile("last reward", spell(last.reward), `step ${last.step}`, trend(last.reward - first.reward)),
      tile("best reward", spell(best.reward), `step ${best.step}`),
    );
  }
  if (losses.length) made.push(tile("first loss", spell(losses[0]), ""), tile("last loss", spell(losses.at(-1)), "", trend(losses.at(-1) - losses[0])));
  const { steps, rewards: tried } = run.evaluations;
  if (tried.length) {
    const last = tried.length - 1;
    const since = last ? `from ${spell(tried[0])} at step ${steps[0]}` : "";
    made.push(tile(losses.length ? "held-out loss" : "evaluation", spell(tried[last]), since || `step ${steps[last]}`, last ? trend(tried[last] - tried[0]) : null));
  }
  if (run.best) made.push(tile("best checkpoint", `step ${run.best.step}`, run.best.figure));
  for (const [key, name, format] of [
    ["time/step", "a step took", spellSeconds],
    ["tokens/per_second", "tokens a second", spell],
    ["staleness/mean", "policy staleness", spell],
  ]) {
    const values = known(run.series.get(key) ?? []);
    if (values.length) made.push(tile(name, format(mean(values)), "mean of all steps"));
  }
  return made;
}

function trend(change) {
  const way = change > 0 ? "up" : change < 0 ? "down" : "level";
  return make("span", { class: `trend ${way}` }, `${{ up: "▲", down: "▼", level: "■" }[way]} ${spell(Math.abs(change))}`);
}

function tile(name, value, below, beside = null) {
  return make(
    "div",
    { class: "tile" },
    make("span", { class: "dim" }, name),
    make("div", { class: "figure" }, make("b", {}, value), beside),
    make("small", { class: "dim" }, below),
  );
}

function drawDiagnoses(run) {
  byId("diagnoses").hidden = !run.diagnoses.length;
  const row = (one) => [one.step, `${one.code.replaceAll("_", " ")}: ${one.figures}`, one.cause, one.advice];
  within("diagnoses", "tbody").append(...run.diagnoses.map((one) => make("tr", {}, ...row(one).map((text) => make("td", {}, text)))));
}
