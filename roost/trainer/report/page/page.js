// The page: its data, and its parts in order.

function readRun(data) {
  return {
    ...data,
    series: new Map(data.series),
    colours: new Map(data.components.map((component) => [component.name, component])),
  };
}

function drawTexts(run) {
  for (const id of ["config", "plan"]) {
    within(id, "pre").textContent = run[id] ?? "";
    byId(id).hidden = !run[id];
  }
  byId("files").hidden = !run.files.length;
  within("files", "ul").append(
    ...run.files.map((file) =>
      make(
        "li",
        {},
        make("a", { href: `./${encodeURIComponent(file.name.replace(/\/$/, ""))}${file.name.endsWith("/") ? "/" : ""}` }, file.name),
        file.bytes ? make("small", { class: "dim" }, spellBytes(file.bytes)) : null,
      ),
    ),
  );
}

function start() {
  const run = readRun(JSON.parse(byId("data").textContent));
  for (const part of [drawHeader, drawDiagnoses, drawReward, drawSmall, drawTimes, drawBusy, drawTimeline, drawRollouts, drawTokens, drawTexts]) part(run);
}

start();
