// An overview of a large cluster: a few pixels for each accelerator, in the colours of its holders.

const FEWEST_NODES = 33;
const MOST_NODES = 20000; // beyond, a node would be less than a pixel
const AXIS = 44; // pixels for the node numbers

function makeOverview(plan, view, onNode) {
  const canvas = byId("overview");
  if (plan.num_nodes < FEWEST_NODES || plan.num_nodes > MOST_NODES) return { update() {} };
  canvas.hidden = false;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `All ${plan.num_nodes} nodes at a glance; the node filter shows any of them`);
  let shape = null;

  function update() {
    shape = shapeOf(plan, canvas.parentElement.clientWidth - 2);
    const ratio = window.devicePixelRatio || 1;
    canvas.width = shape.width * ratio;
    canvas.height = shape.height * ratio;
    canvas.style.height = `${shape.height}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    paint(plan, view, context, shape);
  }

  const nodeAt = (event) => {
    const box = canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - AXIS) / shape.across);
    const row = Math.floor((event.clientY - box.top) / shape.down);
    const node = row * shape.perRow + column;
    return column >= 0 && column < shape.perRow && node < plan.num_nodes ? node : null;
  };
  canvas.addEventListener("mousemove", (event) => {
    const node = nodeAt(event);
    if (node === null) return hideTip();
    const at = { left: event.clientX + 8, top: event.clientY - 6, bottom: event.clientY + 12 };
    showTip(at, nodeTip(plan, node));
  });
  canvas.addEventListener("mouseleave", hideTip);
  canvas.addEventListener("click", (event) => {
    const node = nodeAt(event);
    if (node !== null) onNode(node);
  });
  window.addEventListener("resize", update);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", update);
  return { update };
}

// The largest scale at which the picture is low enough to leave room for the rows.
function shapeOf(plan, width) {
  const devices = Math.max(1, largest(plan.layouts.map((layout) => layout.cells.length)));
  for (const scale of [5, 4, 3, 2, 1]) {
    const across = devices * scale + Math.max(1, Math.min(3, scale));
    const down = 3 * scale + 3;
    const fitting = Math.floor((width - AXIS) / across);
    // Round numbers in a row make node numbers easy to find.
    const perRow = Math.max(1, fitting >= 8 ? fitting - (fitting % 8) : fitting);
    const height = Math.ceil(plan.num_nodes / perRow) * down;
    if (height <= 260 || scale === 1)
      return { scale, across, down, perRow, width, height, tall: down - Math.min(2, scale) };
  }
}

function paint(plan, view, context, shape) {
  const style = getComputedStyle(document.documentElement);
  const [free, dim] = ["--free", "--dim"].map((name) => style.getPropertyValue(name));
  context.font = "10px system-ui, sans-serif";
  context.textBaseline = "top";
  context.fillStyle = dim;
  const every = Math.max(1, Math.ceil(14 / shape.down));
  for (let row = 0; row * shape.perRow < plan.num_nodes; row += every) {
    context.fillText(`${row * shape.perRow}`, 0, row * shape.down);
  }
  for (const run of plan.runs) {
    const cells = run.layout.cells.length
      ? run.layout.cells
      : [[...run.layout.declared.flatMap((device) => device.holders), ...run.layout.cpu]];
    const wide = run.layout.cells.length ? shape.scale : shape.across - 2;
    cells.forEach((holders, index) => {
      const shown = holders.filter((holder) => !view.hidden.has(holder.component));
      const part = shape.tall / Math.max(1, shown.length);
      const colours = shown.length ? shown.map((holder) => plan.components[holder.component].colour) : [free];
      colours.forEach((colour, layer) => {
        context.fillStyle = colour;
        for (let position = 0; position < run.length; position++) {
          const node = nodeOf(run, position);
          const x = AXIS + (node % shape.perRow) * shape.across + index * shape.scale;
          const y = Math.floor(node / shape.perRow) * shape.down + layer * part;
          context.fillRect(x, y, wide, shown.length ? part : shape.tall);
        }
      });
    });
  }
}

function nodeTip(plan, node) {
  const run = runOf(plan, node);
  const lines = [...run.layout.residents].map(([number, { offsets }]) => {
    const ranks = ranksOf(run, positionOf(run, node), { component: number, offsets });
    return make("div", {}, swatch(plan.components[number]), ` ${plan.components[number].name} ${spell(ranks, 4)}`);
  });
  return [make("b", {}, `node ${node}`), ...lines];
}
