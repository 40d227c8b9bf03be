// Creates elements. Text is inserted as text, never as markup: names and variables come from users.

function make(kind, attributes = {}, ...children) {
  const element = document.createElement(kind);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("--")) element.style.setProperty(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const largest = (numbers) => numbers.reduce((one, other) => Math.max(one, other), 0);
const byId = (id) => document.getElementById(id);
const counted = (number, word, words = `${word}s`) => `${number.toLocaleString("en")} ${number === 1 ? word : words}`;

// The swatch of a component: its colour and its short name.
function swatch(component) {
  return make("span", { class: "swatch", "--colour": component.colour, "--on": component.ink }, component.short);
}

// Ascending numbers with runs folded: 0-3,8.
function spell(numbers, most = 8) {
  const runs = [];
  for (const number of numbers) {
    const last = runs[runs.length - 1];
    if (last && number === last[1] + 1) last[1] = number;
    else runs.push([number, number]);
  }
  const words = runs.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`));
  if (words.length > most) words.splice(most / 2, words.length - most, "...");
  return words.join(",");
}
