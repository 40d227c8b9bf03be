// The tooltip of the cell under the pointer or with the focus.

function showTip(anchor, content) {
  const tip = byId("tip");
  tip.replaceChildren(...content);
  tip.hidden = false;
  const at = anchor.getBoundingClientRect ? anchor.getBoundingClientRect() : anchor;
  const box = tip.getBoundingClientRect();
  const left = Math.max(8, Math.min(at.left, document.documentElement.clientWidth - box.width - 8));
  const above = at.top - box.height - 6;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 4 ? above : at.bottom + 6}px`;
}

function hideTip() {
  byId("tip").hidden = true;
}

function tipOf(plan, place) {
  const where = place.length > 1 ? runLabel(place.run) : `node ${nodeOf(place.run, place.position)}`;
  const lines = place.holders.map((holder) => {
    const component = plan.components[holder.component];
    const ranks =
      place.length > 1
        ? `${counted(holder.offsets.length, "process", "processes")} on each`
        : spell(ranksOf(place.run, place.position, holder));
    return make("div", {}, swatch(component), ` ${component.name} ${ranks}`);
  });
  return [make("b", {}, `${where}, ${place.title}`), ...(lines.length ? lines : [make("div", {}, "free")])];
}
