// The legend, which is also the filter by component.

function drawLegend(plan, view, onChange) {
  const legend = byId("legend");
  const buttons = plan.components.map((component, number) => {
    const about = [
      component.role,
      `${component.strategy} placement`,
      component.parallel,
      component.managed_by ? `started by ${component.managed_by} 0` : "",
      component.unused,
    ]
      .filter(Boolean)
      .join(", ");
    const button = make(
      "button",
      { type: "button", class: "component", "aria-pressed": "true", title: about, "data-component": number },
      swatch(component),
      make("b", {}, component.name),
      component.written === component.name ? null : make("small", {}, component.written),
      make("span", { class: "count" }, component.size.toLocaleString("en")),
    );
    button.addEventListener("click", () => {
      if (!view.hidden.delete(number)) view.hidden.add(number);
      refresh();
    });
    return button;
  });
  const all = make("button", { type: "button", class: "plain", hidden: true }, "show all");
  all.addEventListener("click", () => {
    view.hidden.clear();
    refresh();
  });
  function refresh() {
    buttons.forEach((button, number) => button.setAttribute("aria-pressed", String(!view.hidden.has(number))));
    all.hidden = view.hidden.size === 0;
    for (const row of document.querySelectorAll("tr[data-component]"))
      row.hidden = view.hidden.has(Number(row.dataset.component));
    onChange();
  }
  legend.append(...buttons, all);
}
