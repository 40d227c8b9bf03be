// The cells of a row: who holds each accelerator, each declared device, and the node's CPUs.

// The device and the holders of a column of a row.
function contentOf(row, column) {
  const { layout } = row.run;
  if (column <= layout.cells.length) {
    return { title: `accelerator ${column - 1}`, holders: layout.cells[column - 1], device: null };
  }
  const extra = extrasOf(layout)[column - 1 - layout.cells.length];
  const title = extra.device ? extra.name : "without a device";
  return { title, holders: extra.holders, device: extra.device ?? null };
}

function drawRow(plan, view, row, index, top) {
  const { run } = row;
  const height = cellHeight(run.layout);
  const folded = row.length > 1;
  const label = folded ? runLabel(run) : `node ${nodeOf(run, row.position)}`;
  const host = folded ? "" : (plan.hosts[nodeOf(run, row.position)] ?? "");
  const alike = folded ? `${run.length.toLocaleString("en")} alike` : "";
  const about = [alike, host, ...run.layout.groups, run.layout.machine].filter(Boolean).join(" · ");
  const element = make(
    "div",
    {
      class: `row${folded ? " folded" : ""}${row.isInside ? " inside" : ""}`,
      role: "row",
      "data-row": index,
      "aria-rowindex": index + 1,
      "--top": `${top}px`,
    },
    make(
      "div",
      {
        class: "label",
        role: "rowheader",
        "data-column": 0,
        tabindex: -1,
        title: about ? `${label}: ${about}` : label,
        "aria-expanded": folded ? String(view.open.has(run)) : null,
      },
      make("b", {}, label),
      make("small", {}, about),
    ),
    make(
      "div",
      { class: "cells", "--height": `${height}px` },
      ...run.layout.cells.map((holders, number) => drawCell(plan, view, row, holders, number)),
    ),
  );
  const extras = extrasOf(run.layout);
  if (extras.length) {
    const from = run.layout.cells.length + 1;
    element.append(
      make(
        "div",
        { class: "extras" },
        ...extras.map((extra, number) => drawPill(plan, view, row, extra, from + number)),
      ),
    );
  }
  return element;
}

// Ranks are shown on rows of one node; on a row of several, they differ from node to node.
function stripe(plan, row, holder, isLong, joined = "") {
  const component = plan.components[holder.component];
  const many = holder.offsets.length;
  let words =
    row.length > 1 ? (many > 1 ? `×${many}` : "") : spell(ranksOf(row.run, row.position, holder), isLong ? 4 : 2);
  if (words.length > (isLong ? 11 : 7)) words = `×${many}`;
  return make(
    "span",
    {
      class: `stripe${joined}${!isLong && words.length > 4 ? " long" : ""}`,
      "--colour": component.colour,
      "--on": component.ink,
    },
    make("b", {}, component.short),
    words ? make("span", {}, words) : null,
  );
}

function drawCell(plan, view, row, holders, number) {
  const shown = holders.filter((holder) => !view.hidden.has(holder.component));
  const stripes = shown
    .slice(0, shown.length > MOST_STRIPES ? MOST_STRIPES - 1 : MOST_STRIPES)
    .map((holder) => stripe(plan, row, holder, false, joinedWith(row.run.layout, view, holder, number)));
  if (shown.length > MOST_STRIPES)
    stripes.push(make("span", { class: "stripe more" }, `+${shown.length - MOST_STRIPES + 1}`));
  const names = shown.map((holder) => plan.components[holder.component].name).join(", ");
  return make(
    "div",
    {
      class: `cell${shown.length ? "" : " free"}`,
      role: "gridcell",
      "data-column": number + 1,
      tabindex: -1,
      "aria-label": `accelerator ${number}: ${names || (holders.length ? "hidden" : "free")}`,
    },
    ...stripes,
  );
}

// Classes for a holder that also holds the neighbouring devices, in the same stripe of a cell of the same height.
function joinedWith(layout, view, holder, number) {
  const shownAt = (index) => (layout.cells[index] ?? []).filter((other) => !view.hidden.has(other.component));
  const own = shownAt(number);
  const isSame = (index) => {
    const others = shownAt(index);
    const other = others[own.indexOf(holder)];
    return (
      others.length === own.length &&
      other?.component === holder.component &&
      `${other.offsets}` === `${holder.offsets}`
    );
  };
  const before = number % COLUMNS > 0 && isSame(number - 1) ? " joined-before" : "";
  return before + ((number + 1) % COLUMNS > 0 && isSame(number + 1) ? " joined-after" : "");
}

function drawPill(plan, view, row, extra, column) {
  const shown = extra.holders.filter((holder) => !view.hidden.has(holder.component));
  const names = shown.map((holder) => plan.components[holder.component].name).join(", ");
  return make(
    "div",
    {
      class: `pill${shown.length ? "" : " free"}`,
      role: "gridcell",
      "data-column": column,
      tabindex: -1,
      "aria-label": `${extra.name}: ${names || "free"}`,
    },
    make("span", { class: "kind" }, extra.name),
    ...shown.map((holder) => stripe(plan, row, holder, true)),
  );
}
