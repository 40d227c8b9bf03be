// The rows of the grid and their heights; grid.js draws them.

const COLUMNS = 8; // accelerators side by side; a node with more has several lines
const MOST_STRIPES = 4; // holders drawn in one cell; the rest are counted
const UNFOLDED_NODES = 32; // a cluster of up to so many nodes is shown node by node
const PILL = 24;
const GAP = 4;

// Rows in order, of single nodes or of runs; `length` is the number of nodes of a row.
function rowsOf(plan, view) {
  const rows = [];
  const isShown = (run) => view.hidden.size === 0 || [...run.lowest.keys()].some((number) => !view.hidden.has(number));
  if (view.nodes) {
    for (const node of view.nodes) {
      const run = runOf(plan, node);
      if (isShown(run)) rows.push({ run, position: positionOf(run, node), length: 1 });
    }
    return rows;
  }
  if (view.isFlat) {
    for (let node = 0; node < plan.num_nodes; node++) {
      const run = runOf(plan, node);
      if (isShown(run)) rows.push({ run, position: positionOf(run, node), length: 1 });
    }
    return rows;
  }
  for (const run of plan.runs) {
    if (!isShown(run)) continue;
    rows.push({ run, position: 0, length: run.length });
    if (run.length > 1 && view.open.has(run)) {
      for (let position = 0; position < run.length; position++) rows.push({ run, position, length: 1, isInside: true });
    }
  }
  return rows;
}

// The devices and processes of a row after its accelerators: declared devices, then processes without a device.
function extrasOf(layout) {
  return [
    ...layout.declared.map((device) => ({ name: `${device.kind} ${device.index}`, holders: device.holders, device })),
    ...layout.cpu.map((holder) => ({ name: "CPU", holders: [holder] })),
  ];
}

function cellHeight(layout) {
  const most = Math.max(1, ...layout.cells.map((holders) => Math.min(holders.length, MOST_STRIPES)));
  return Math.max(34, most * 16 + 2);
}

function rowHeight(layout) {
  const lines = Math.ceil(layout.cells.length / COLUMNS);
  const extras = layout.declared.length + layout.cpu.length;
  return Math.max(34, lines * (cellHeight(layout) + GAP) - GAP, extras * (PILL + GAP) - GAP) + 8;
}
