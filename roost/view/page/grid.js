// The grid. Only the visible rows are in the document, so that thousands of nodes cost no more than a screenful.

const TALLEST = 1500; // pixels; a taller grid scrolls by itself
const MARGIN = 400; // pixels drawn above and below the visible rows

class GridView {
  constructor(plan, view, onPick, onFold) {
    Object.assign(this, { plan, view, onPick, onFold, rows: [], tops: [0], drawn: new Map(), picked: null });
    this.active = { row: 0, column: 0 }; // the cell that the Tab key comes to
    this.grid = byId("grid");
    this.body = make("div", { class: "rows", role: "presentation" });
    const columns = Math.min(COLUMNS, largest(plan.layouts.map((layout) => layout.cells.length)));
    const hasExtras = plan.layouts.some((layout) => layout.declared.length || layout.cpu.length);
    this.grid.style.setProperty("--columns", columns);
    this.grid.classList.toggle("no-extras", !hasExtras);
    this.grid.append(drawHead(columns, hasExtras), this.body);
    this.listen();
  }

  // After a filter changed, or a run was folded or opened.
  update() {
    this.rows = rowsOf(this.plan, this.view);
    this.tops = [0];
    for (const row of this.rows) this.tops.push(this.tops.at(-1) + rowHeight(row.run.layout));
    this.grid.classList.toggle("tall", this.tops.at(-1) > TALLEST);
    this.grid.setAttribute("aria-rowcount", this.rows.length);
    this.body.style.height = `${this.tops.at(-1)}px`;
    this.active.row = Math.max(0, Math.min(this.active.row, this.rows.length - 1));
    this.body.replaceChildren();
    this.drawn.clear();
    this.draw();
  }

  draw(isPrinted = false) {
    const wanted = this.rowsInSight(isPrinted);
    for (const [index, element] of this.drawn) {
      if (wanted.has(index)) continue;
      element.remove();
      this.drawn.delete(index);
    }
    for (const index of wanted) if (!this.drawn.has(index)) this.insert(index);
    this.mark();
  }

  // Includes the active row: focus on an element that leaves the document is lost.
  rowsInSight(isPrinted) {
    const wanted = new Set(this.rows.length ? [this.active.row] : []);
    const isTall = this.grid.classList.contains("tall") && !isPrinted;
    const from = isTall ? this.grid.scrollTop - MARGIN : 0;
    const to = isTall ? this.grid.scrollTop + this.grid.clientHeight + MARGIN : Infinity;
    const first = firstBelow(this.tops, from);
    for (let index = first; index < this.rows.length && this.tops[index] < to; index++) wanted.add(index);
    return wanted;
  }

  // Rows are in order in the document, for screen readers.
  insert(index) {
    const element = drawRow(this.plan, this.view, this.rows[index], index, this.tops[index]);
    const isLast = !this.body.lastChild || Number(this.body.lastChild.dataset.row) < index;
    const next = isLast ? null : [...this.body.children].find((child) => Number(child.dataset.row) > index);
    this.body.insertBefore(element, next);
    this.drawn.set(index, element);
  }

  cellsOf(index) {
    return [...(this.drawn.get(index)?.querySelectorAll("[data-column]") ?? [])];
  }

  mark() {
    for (const element of this.body.querySelectorAll('[tabindex="0"]')) element.tabIndex = -1;
    const cells = this.cellsOf(this.active.row);
    const cell = cells[this.active.column] ?? cells[0];
    if (cell) cell.tabIndex = 0;
    this.body.querySelector(".picked")?.classList.remove("picked");
    for (const index of this.picked ? this.drawn.keys() : []) {
      const { run, position, length } = this.rows[index];
      const { picked } = this;
      if (picked.run !== run || picked.position !== position || picked.length !== length) continue;
      this.cellsOf(index)[picked.column]?.classList.add("picked");
    }
  }

  moveTo(row, column) {
    this.active.row = Math.max(0, Math.min(this.rows.length - 1, row));
    this.draw();
    const cells = this.cellsOf(this.active.row);
    this.active.column = Math.max(0, Math.min(cells.length - 1, column));
    this.mark();
    cells[this.active.column]?.focus({ preventScroll: true });
    this.drawn.get(this.active.row)?.scrollIntoView({ block: "nearest" });
  }

  focus() {
    this.moveTo(this.active.row, this.active.column);
  }

  // A label folds or opens its run; any other cell is picked.
  act(index, column) {
    Object.assign(this.active, { row: index, column });
    const { run, position, length } = this.rows[index];
    if (column === 0) return length > 1 ? this.onFold(run) : undefined;
    this.picked = { run, position, length, column };
    this.mark();
    hideTip();
    return this.onPick({ run, position, length, ...contentOf(this.rows[index], column) });
  }

  point(index, column, cell) {
    if (column === 0) return hideTip();
    const row = this.rows[index];
    return showTip(cell, tipOf(this.plan, { ...row, ...contentOf(row, column) }));
  }

  listen() {
    // Calls `react` for events anywhere in a cell.
    const onCell = (kind, react) =>
      this.body.addEventListener(kind, (event) => {
        const cell = event.target.closest("[data-column]");
        if (cell) react(Number(cell.closest("[data-row]").dataset.row), Number(cell.dataset.column), cell, event);
      });
    onCell("click", (row, column) => this.act(row, column));
    onCell("mouseover", (row, column, cell) => this.point(row, column, cell));
    onCell("focusin", (row, column, cell) => this.point(row, column, cell));
    onCell("keydown", (row, column, _, event) => this.press(row, column, event));
    this.body.addEventListener("mouseleave", hideTip);
    this.body.addEventListener("focusout", hideTip);
    this.grid.addEventListener("scroll", () => requestAnimationFrame(() => this.draw()), { passive: true });
    window.addEventListener("resize", () => this.draw());
    window.addEventListener("beforeprint", () => this.draw(true));
  }

  press(row, column, event) {
    const steps = {
      ArrowUp: [row - 1, column],
      ArrowDown: [row + 1, column],
      ArrowLeft: [row, column - 1],
      ArrowRight: [row, column + 1],
      Home: [row, 0],
      End: [row, Infinity],
      PageUp: [row - 10, column],
      PageDown: [row + 10, column],
    };
    if (event.key === "Enter" || event.key === " ") this.act(row, column);
    else if (steps[event.key]) this.moveTo(...steps[event.key]);
    else return;
    event.preventDefault();
  }
}

// The first row whose lower end is below a height, by binary search.
function firstBelow(tops, from) {
  let [low, high] = [0, tops.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (tops[middle + 1] <= from) low = middle + 1;
    else high = middle;
  }
  return low;
}

function drawHead(columns, hasExtras) {
  const numbers = Array.from({ length: columns }, (_, index) => make("span", {}, `${index}`));
  return make(
    "div",
    { class: "row head", "aria-hidden": "true" },
    make("div", { class: "label" }, "node"),
    make("div", { class: "cells" }, ...numbers),
    hasExtras ? make("div", { class: "extras" }, "robots, CPU") : null,
  );
}
