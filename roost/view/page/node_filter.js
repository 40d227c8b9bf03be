// The node filter: ranks and ranges (`3`, `8-15`), node groups (`0-3,a800`), or parts of host names.

function findNodes(plan, text) {
  const words = text.split(/[\s,]+/).filter(Boolean);
  if (!words.length) return { nodes: null, problem: "" };
  const nodes = new Set();
  for (const word of words) {
    const found = nodesOf(plan, word);
    if (found.problem) return { nodes: [], problem: found.problem };
    found.nodes.forEach((node) => nodes.add(node));
  }
  return { nodes: [...nodes].sort((one, other) => one - other), problem: "" };
}

function nodesOf(plan, word) {
  // Labels come first: a group may be called 4090.
  if (plan.groups.has(word)) return { nodes: plan.groups.get(word) };
  const range = /^(\d+)(?:-(\d+))?$/.exec(word);
  if (range) {
    const first = Number(range[1]);
    const last = Math.min(Number(range[2] ?? range[1]), plan.num_nodes - 1);
    if (first >= plan.num_nodes) return { problem: `there is no node ${first}; the last is ${plan.num_nodes - 1}` };
    return { nodes: Array.from({ length: Math.max(0, last - first + 1) }, (_, index) => first + index) };
  }
  const nodes = plan.hosts.flatMap((host, node) => (host.includes(word) ? [node] : []));
  if (nodes.length) return { nodes };
  const labels = [...plan.groups.keys()];
  return { problem: `no nodes are called ${word}${labels.length ? `; groups: ${labels.join(", ")}` : ""}` };
}
