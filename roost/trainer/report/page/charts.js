// The reward, and a small chart for each other thing that was measured.

const BLUE = "var(--blue)";
const ORANGE = "var(--orange)";
const SMALL = [
  { title: "Policy staleness", keys: ["staleness/mean", "staleness/max"], zero: true },
  { title: "Policy loss", keys: ["loss/policy"] },
  { title: "Gradient norm", keys: ["grad/norm"], zero: true },
  { title: "Gradient noise scale, samples", keys: ["grad/noise_scale"], zero: true },
  { title: "Skipped optimizer steps", keys: ["steps/skipped", "critic/skipped"], zero: true, hidden: isZero },
  { title: "Entropy", keys: ["entropy"] },
  { title: "Learner and engine apart", keys: ["mismatch/logprob_mean"] },
  { title: "Tokens a second", keys: ["tokens/per_second"], zero: true },
];

function drawReward(run) {
  const isSupervised = run.series.has("loss/supervised");
  const rewards = run.series.get(isSupervised ? "loss/supervised" : "reward/mean") ?? run.steps.map(() => null);
  if (isSupervised) within("reward", "h2").textContent = "Loss";
  const tried = run.evaluations;
  const also = ["reward/std", "reward/max"].filter((key) => run.series.has(key));
  const series = [
    {
      name: "mean of the step",
      values: rewards,
      colour: BLUE,
      kind: "each",
      also: also.map((key) => ({ name: key, values: run.series.get(key), colour: "transparent" })),
    },
    { name: "smoothed", values: smooth(rewards, Math.ceil(rewards.length / 25)), colour: BLUE, kind: "smooth" },
  ];
  const points = tried.steps.length
    ? {
        name: "evaluation",
        steps: tried.steps,
        values: tried.rewards,
        colour: "var(--red)",
        describe: (index) => spell(tried.rewards[index]) + (tried.samples[index] ? ` of ${spell(tried.samples[index])}` : ""),
      }
    : null;
  if (known(rewards).length || points) within("reward", ".legend").append(
    make("span", {}, swatch(BLUE, "faint"), "each step"),
    make("span", {}, swatch(BLUE, "line"), "smoothed"),
    ...(points ? [make("span", {}, swatch(points.colour, "diamond"), "evaluation")] : []),
  );
  lineChart(within("reward", ".chart"), run.steps, series, { label: `${isSupervised ? "Loss" : "Reward"} over steps`, points });
}

function drawSmall(run) {
  const used = new Set(["reward/mean", "loss/supervised", "version", ...SMALL.flatMap((chart) => chart.keys)]);
  for (const { title, keys, zero, hidden } of SMALL) {
    const there = keys.filter((key) => run.series.has(key) && !hidden?.(run.series.get(key)));
    if (there.length) byId("small").append(smallChart(run, title, there, zero));
  }
  byId("small").hidden = !byId("small").children.length;
  const rest = [...run.series.keys()].filter((key) => !used.has(key) && !key.startsWith("time/") && !key.startsWith("busy/"));
  byId("more").hidden = !rest.length;
  // Drawn when somebody looks: there may be hundreds.
  byId("more").addEventListener("toggle", () => within("more", ".small-charts").append(...rest.map((key) => smallChart(run, key, [key]))), { once: true });
}

function isZero(values) {
  return values.every((value) => !value);
}

function smallChart(run, title, keys, zero = false) {
  const colours = [BLUE, ORANGE];
  const series = keys.map((key, index) => ({ name: key, values: run.series.get(key), colour: colours[index] }));
  const newest = known(series[0].values).at(-1);
  const chart = make("div", { class: "chart low" });
  const box = make(
    "section",
    { class: "small" },
    make("div", { class: "bar" }, make("h3", {}, title), make("span", { class: "newest" }, spell(newest))),
    keys.length > 1 ? make("div", { class: "legend" }, ...series.map((one) => make("span", {}, swatch(one.colour, "line"), one.name))) : null,
    chart,
  );
  lineChart(chart, run.steps, series, { label: `${title} over steps`, zero });
  return box;
}
