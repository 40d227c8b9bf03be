"""The Ray actor that holds a job's accelerators on a node. Its process imports this file, so keep it small."""

from __future__ import annotations

import ray


class Keeper:
    """Holds accelerators of one node for as long as it lives."""

    def indices(self, resource: str) -> list[int]:
        """Indices of the node's accelerators that Ray allocated to this actor, in Ray's numbering.

        Ray's public accelerator ids are either these indices or entries of a visibility mask, depending on the
        vendor, so the indices are read from the core worker.
        """
        held = ray._private.worker.global_worker.core_worker.resource_ids()  # type: ignore[attr-defined]
        names = (resource, f"{resource}_group_")
        return sorted(
            {
                int(index)
                for name, parts in held.items()
                if name == names[0] or (name.startswith(names[1]) and name.count("_group_") == 1)
                for index, _ in parts
            }
        )
