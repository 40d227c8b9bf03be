// A short note beside what is pointed at.

function showTip(x, y, ...content) {
  const tip = byId("tip");
  tip.replaceChildren(...content);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const room = document.documentElement.clientWidth;
  tip.style.left = `${x + 14 + box.width > room - 8 ? Math.max(8, x - 14 - box.width) : x + 14}px`;
  tip.style.top = `${Math.max(8, Math.min(y - 10, window.innerHeight - box.height - 8))}px`;
}

function hideTip() {
  byId("tip").hidden = true;
}

function tipRow(colour, name, value) {
  return make("div", { class: "tip-row" }, swatch(colour), make("span", {}, name), make("b", {}, value));
}
