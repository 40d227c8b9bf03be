// Elements from values. Text goes in as text, never as markup: models write what they like.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("--")) element.style.setProperty(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const make = (kind, attributes = {}, ...children) => fill(document.createElement(kind), attributes, children);
const draw = (kind, attributes = {}, ...children) => fill(document.createElementNS(SVG, kind), attributes, children);
const byId = (id) => document.getElementById(id);
const within = (id, selector) => byId(id).querySelector(selector);

function swatch(colour, kind = "") {
  return make("i", { class: `swatch ${kind}`, "--colour": colour });
}
