"""Resource ranks: which node and which device of it a rank of one or several node groups means.

Ranks are numbered node by node, group after group. The table keeps one entry for each node of each group with the first
rank on it (a prefix sum), so that a million ranks are located by one binary search instead of a million walks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
ACCELERATOR = "accelerator"
NODE = "node"


@dataclass(frozen=True)
class ResourceTable:
    """The resources of some node groups in order; `kinds` says what each group counts.

    >>> table = ResourceTable.build(("a", "b"), ("accelerator", "accelerator"),
    ...                             [np.array([0, 1]), np.array([2])], [np.array([2, 2]), np.array([4])])
    >>> table.total, [part.tolist() for part in table.locate(np.array([1, 3, 4, 7]))]
    (8, [[0, 1, 2, 2], [1, 1, 0, 3]])
    """

    labels: tuple[str, ...]
    kinds: tuple[str, ...]
    nodes: Ints  # the node of each entry
    groups: Ints  # the index into `labels` of each entry
    starts: Ints  # the first rank of each entry, and the total at the end

    @classmethod
    def build(
        cls, labels: tuple[str, ...], kinds: tuple[str, ...], nodes: list[Ints], counts: list[Ints]
    ) -> ResourceTable:
        all_counts = np.concatenate(counts) if counts else np.zeros(0, np.int64)
        return cls(
            labels,
            kinds,
            nodes=np.concatenate(nodes) if nodes else np.zeros(0, np.int64),
            groups=np.repeat(np.arange(len(nodes)), [len(part) for part in nodes]),
            starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(all_counts)]),
        )

    @property
    def total(self) -> int:
        return int(self.starts[-1])

    @property
    def counts_nodes(self) -> bool:
        """Return True if ranks mean nodes: for all groups, as soon as one has nothing else to count."""
        return NODE in self.kinds

    @property
    def is_mixed(self) -> bool:
        return self.counts_nodes and any(kind != NODE for kind in self.kinds)

    def entries(self, ranks: Ints) -> Ints:
        """Entry of each rank; ranks must be within the total."""
        return np.searchsorted(self.starts, ranks, side="right") - 1

    def locate(self, ranks: Ints) -> tuple[Ints, Ints]:
        """The node of each rank and the index of the device on that node."""
        entries = self.entries(ranks)
        return self.nodes[entries], ranks - self.starts[entries]

    def node_table(self) -> ResourceTable:
        """The same groups with nodes as the resources."""
        nodes = [self.nodes[self.groups == index] for index in range(len(self.labels))]
        return ResourceTable.build(
            self.labels, (NODE,) * len(self.labels), nodes, [np.ones(len(part), np.int64) for part in nodes]
        )
