// Numbers as people read them, and the round ones that axes show.

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const known = (values) => values.filter(isNumber);
const sum = (values) => values.reduce((one, other) => one + other, 0);
const mean = (values) => (values.length ? sum(values) / values.length : null);
const counted = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
const percent = (share) => `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

// The least and the largest; spreading a long list into Math.min would overflow the stack.
function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

function spell(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(2);
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  if (Number.isInteger(value)) return String(value);
  return value.toPrecision(size >= 100 ? 4 : 3);
}

function spellSeconds(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds === 0) return "0 s";
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

function spellDate(seconds) {
  return new Date(seconds * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
}

function spellBytes(bytes) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  const power = bytes ? Math.min(units.length - 1, Math.floor(Math.log10(bytes) / 3)) : 0;
  return `${(bytes / 1000 ** power).toFixed(power && bytes / 1000 ** power < 10 ? 1 : 0)} ${units[power]}`;
}

// The number of a tick, with as many decimals as tell it from the next, a step away.
function spellTick(value, step) {
  if (value === 0 && step < 1e-5) return "0";
  const power = Math.floor(Math.log10(step) + 1e-9);
  if (Math.abs(value) >= 1e6 || step < 1e-5) {
    return value.toExponential(Math.min(11, Math.max(0, Math.floor(Math.log10(Math.abs(value)) + 1e-9) - power)));
  }
  const decimals = Math.max(0, -power);
  return value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

// Round numbers from low to high, about as many as wanted, and the step between them.
function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  if (!(rough > 0)) return { values: [low], step: 1 };
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return { values: Array.from({ length: last - first + 1 }, (_, number) => Number(((first + number) * step).toPrecision(12))), step };
}

// The mean of so many values on either side, nearer ones counting more: a trend that does not come late.
function smooth(values, reach) {
  return values.map((_, middle) => {
    let [total, weights] = [0, 0];
    for (let at = Math.max(0, middle - reach); at <= Math.min(values.length - 1, middle + reach); at += 1) {
      if (!isNumber(values[at])) continue;
      const weight = reach + 1 - Math.abs(at - middle);
      total += weight * values[at];
      weights += weight;
    }
    return weights ? total / weights : null;
  });
}
