// What the policy wrote: the same tasks before and after, and rollouts of every step.

const ROWS = 60;

function drawRollouts(run) {
  const section = byId("rollouts");
  const heading = make("div", { class: "bar" }, make("h2", { id: "rollouts-title" }, "Rollouts"));
  section.append(heading);
  if (!run.rollouts.length) {
    section.append(make("p", { class: "nothing" }, "No rollouts were kept."));
    return;
  }
  if (run.rollouts.length < run.rollouts_total) {
    heading.append(make("span", { class: "dim" }, `${run.rollouts.length.toLocaleString("en")} of ${run.rollouts_total.toLocaleString("en")}; all are in samples.jsonl`));
  }
  if (run.pairs.length) section.append(beforeAndAfter(run.pairs));
  section.append(...rolloutTable(run.rollouts));
}

function beforeAndAfter(pairs) {
  const [one, other] = pairs[0];
  const rows = pairs.map(([before, after]) =>
    make(
      "tr",
      {},
      make("td", { class: "task" }, textOf(before.task === after.task ? before.task : `${before.task}\n→ ${after.task}`)),
      make("td", {}, make("div", { class: "rated" }, rewardOf(before.reward), textOf(before.completion))),
      make("td", {}, make("div", { class: "rated" }, rewardOf(after.reward), textOf(after.completion))),
    ),
  );
  return make(
    "table",
    { class: "pairs" },
    make("thead", {}, make("tr", {}, make("th", {}, "task"), make("th", {}, `before, step ${one.step}`), make("th", {}, `after, step ${other.step}`))),
    make("tbody", {}, ...rows),
  );
}

function rolloutTable(rollouts) {
  const steps = [...new Set(rollouts.map((one) => one.step))];
  const kinds = [...new Set(rollouts.map((one) => one.kind ?? "train"))];
  const slider = make("input", { type: "range", id: "step-slider", min: 0, max: steps.length, value: 0, "aria-label": "step" });
  const said = make("output", { id: "step-said" });
  const search = make("input", { type: "search", id: "rollout-search", placeholder: "find in any text", spellcheck: "false" });
  const kind = make("select", { id: "rollout-kind", "aria-label": "kind" }, make("option", { value: "" }, "all kinds"), ...kinds.map((name) => make("option", {}, name)));
  const count = make("span", { class: "dim", id: "rollout-count", role: "status" });
  const body = make("tbody");
  const more = make("button", { type: "button", class: "plain", id: "more-rollouts" });
  let shown = ROWS;

  function update() {
    const step = Number(slider.value) ? steps[Number(slider.value) - 1] : null;
    const words = search.value.toLowerCase();
    const found = rollouts.filter(
      (one) =>
        (step === null || one.step === step) &&
        (!kind.value || (one.kind ?? "train") === kind.value) &&
        (!words || searchable(one).includes(words)),
    );
    said.textContent = step === null ? "all steps" : `step ${step}`;
    slider.setAttribute("aria-valuetext", said.textContent);
    count.textContent = counted(found.length, "rollout");
    body.replaceChildren(...found.slice(0, shown).map(rolloutRow));
    more.hidden = found.length <= shown;
    more.textContent = `show ${Math.min(ROWS, found.length - shown)} more`;
  }
  for (const input of [slider, search, kind]) {
    input.addEventListener("input", () => {
      shown = ROWS;
      update();
    });
  }
  more.addEventListener("click", () => {
    shown += ROWS;
    update();
  });
  update();
  const names = ["step", "kind", "task", "completion", "reward", "staleness", "tokens"];
  const head = make("thead", {}, make("tr", {}, ...names.map((name) => make("th", { class: `of-${name}` }, name))));
  return [
    make("div", { class: "bar filters" }, make("label", { class: "step-filter" }, said, slider), search, kind, count),
    make("div", { class: "scrolled" }, make("table", { class: "rollouts" }, head, body)),
    more,
  ];
}

function rolloutRow(one) {
  const cell = (name, ...content) => make("td", { class: `of-${name}` }, ...content);
  return make(
    "tr",
    {},
    cell("step", String(one.step)),
    cell("kind", make("span", { class: `kind ${one.kind === "evaluation" ? "evaluation" : ""}` }, one.kind ?? "train")),
    cell("task", textOf(one.task), imagesOf(one.images)),
    cell("completion", textOf(one.completion), conversationOf(one.messages)),
    cell("reward", rewardOf(one.reward), ...partsOf(one.parts)),
    cell("staleness", spell(one.staleness)),
    cell("tokens", spell(one.tokens), one.truncated ? make("div", { class: "part bad", title: "a token limit or a full context ended a turn" }, "truncated") : null),
  );
}

function searchable(one) {
  const said = (one.messages ?? []).map((message) => message.content).join("\n");
  return `${one.task}\n${one.completion}\n${said}`.toLowerCase();
}

// Images that the policy was shown; only data URLs, as nothing else may be loaded.
function imagesOf(images) {
  const shown = (images ?? []).filter((image) => String(image).startsWith("data:image/"));
  if (!shown.length) return null;
  return make("div", { class: "images" }, ...shown.map((image, place) => make("img", { src: image, alt: `image ${place + 1}` })));
}

// The whole conversation: what the policy was given, and what it generated.
function conversationOf(messages) {
  if (!messages || !messages.length) return null;
  const turns = messages.filter((message) => message.generated).length;
  const summary = `${counted(messages.length, "message")}, ${counted(turns, "turn")} generated`;
  const details = make("details", { class: "conversation" }, make("summary", { class: "dim" }, summary));
  // Drawn when it is opened: a page may hold thousands of them.
  details.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1) details.append(...messages.map(messageOf));
  });
  return details;
}

function messageOf(message) {
  const facts = [message.sequence ? `sequence ${message.sequence}` : null, message.generated ? counted(message.tokens ?? 0, "token") : null, message.finish || null];
  return make(
    "div",
    { class: `message ${message.generated ? "generated" : ""}` },
    make("div", { class: "role" }, String(message.role), make("span", { class: "dim" }, facts.filter((fact) => fact !== null).join(" · "))),
    make("div", { class: "text" }, String(message.content) || make("i", { class: "dim" }, "nothing")),
  );
}

// A long text shows how it begins, and all of it to whoever wants to read it.
function textOf(text) {
  const words = text === null || text === undefined ? "" : String(text);
  if (words.length <= 240 && words.split("\n").length <= 5) return make("div", { class: "text" }, words || make("i", { class: "dim" }, "nothing"));
  const short = `${words.split("\n").slice(0, 4).join("\n").slice(0, 220).trimEnd()} …`;
  return make("details", { class: "text" }, make("summary", {}, short), words);
}

// What each reward gave, before it was weighted.
function partsOf(parts) {
  return Object.entries(parts ?? {}).map(([name, score]) => make("div", { class: "part dim" }, `${name} ${spell(score)}`));
}

function rewardOf(reward) {
  return make("b", { class: `reward ${reward > 0 ? "good" : reward < 0 ? "bad" : ""}` }, spell(reward));
}

function drawTokens(run) {
  byId("tokens").hidden = !run.tokens.length;
  const row = (one) => [one.step, spell(one.ratio), JSON.stringify(one.token ?? ""), one.before ?? "", one.position ?? ""];
  within("tokens", "tbody").append(...run.tokens.map((one) => make("tr", {}, ...row(one).map((text) => make("td", {}, text)))));
}
