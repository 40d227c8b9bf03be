// The plan from its folded form: runs of equal nodes, each with a layout and the lowest rank of each component by node.

// Numbers from a flat list of progressions (start, step, length); a single number is itself.
function unpack(packed) {
  if (typeof packed === "number") return [packed];
  const numbers = [];
  for (let at = 0; at < packed.length; at += 3) {
    for (let index = 0; index < packed[at + 2]; index++) numbers.push(packed[at] + index * packed[at + 1]);
  }
  return numbers;
}

function readPlan(data) {
  const holders = (list) => list.map(([component, offsets]) => ({ component, offsets: unpack(offsets) }));
  const layouts = data.layouts.map((layout) => ({
    ...layout,
    cells: layout.cells.map(holders),
    declared: layout.declared.map(([kind, index, held]) => ({ kind, index, holders: holders(held) })),
    cpu: holders(layout.cpu),
    residents: new Map(
      layout.residents.map(([component, offsets, starts]) => [
        component,
        { offsets: unpack(offsets), starts: unpack(starts) },
      ]),
    ),
  }));
  const runs = data.runs.map(([first, step, length, layout, ranks]) => ({
    first,
    step,
    length,
    layout: layouts[layout],
    lowest: new Map(Object.entries(ranks).map(([component, packed]) => [Number(component), unpack(packed)])),
  }));
  const groups = new Map(data.groups.map(([label, packed]) => [label, unpack(packed)]));
  return { ...data, layouts, runs, groups, places: placesOf(runs, data.num_nodes) };
}

// The number of each node's run.
function placesOf(runs, length) {
  const places = new Int32Array(length);
  runs.forEach((run, number) => {
    for (let position = 0; position < run.length; position++) places[run.first + position * run.step] = number;
  });
  return places;
}

const nodeOf = (run, position) => run.first + position * run.step;
const runOf = (plan, node) => plan.runs[plan.places[node]];
const positionOf = (run, node) => (node - run.first) / run.step;

function runLabel(run) {
  if (run.length === 1) return `node ${run.first}`;
  const nodes = `nodes ${run.first}-${nodeOf(run, run.length - 1)}`;
  if (run.step === 1) return nodes;
  const tail = [11, 12, 13].includes(run.step % 100) ? "th" : ({ 1: "st", 2: "nd", 3: "rd" }[run.step % 10] ?? "th");
  return `${nodes}, every ${run.step}${tail}`;
}

// The ranks of a holder on the node at a position of a run.
function ranksOf(run, position, holder) {
  const lowest = run.lowest.get(holder.component)[position];
  return holder.offsets.map((offset) => lowest + offset);
}

// The node that a process runs on: usually `node`, else the one that has it among its residents.
function homeOf(plan, component, rank, node) {
  const isHome = (run, position) => {
    const residents = run.layout.residents.get(component);
    return residents && residents.offsets.includes(rank - run.lowest.get(component)[position]);
  };
  const here = runOf(plan, node);
  if (isHome(here, positionOf(here, node))) return node;
  for (const run of plan.runs) {
    for (let position = 0; position < run.length; position++) if (isHome(run, position)) return nodeOf(run, position);
  }
  return node;
}

// The devices of a process as [node, kind, indices]; searches all nodes only if processes of the component span nodes.
function devicesOf(plan, component, rank, home) {
  const found = [];
  const look = (run, position) => {
    if (!run.lowest.has(component)) return;
    const offset = rank - run.lowest.get(component)[position];
    const holds = (holders) =>
      holders.some((holder) => holder.component === component && holder.offsets.includes(offset));
    const indices = run.layout.cells.flatMap((holders, index) => (holds(holders) ? [index] : []));
    if (indices.length) found.push([nodeOf(run, position), "", indices]);
    for (const device of run.layout.declared) {
      if (holds(device.holders)) found.push([nodeOf(run, position), device.kind, [device.index]]);
    }
  };
  if (!plan.components[component].spans) {
    const run = runOf(plan, home);
    look(run, positionOf(run, home));
  } else {
    for (const run of plan.runs) for (let position = 0; position < run.length; position++) look(run, position);
  }
  return found.sort((one, other) => one[0] - other[0]);
}

// The details of one process; `node` is any node where it runs or holds a device.
function processOf(plan, component, rank, node) {
  const home = homeOf(plan, component, rank, node);
  const run = runOf(plan, home);
  const residents = run.layout.residents.get(component) ?? { offsets: [], starts: [] };
  const local = residents.offsets.indexOf(rank - run.lowest.get(component)[positionOf(run, home)]);
  const start = residents.starts[local];
  return {
    component,
    rank,
    home,
    local,
    localSize: residents.offsets.length,
    start,
    devices: devicesOf(plan, component, rank, home),
    ...plan.starts[start],
  };
}
