"""Number of processes that fit into memory, and a smaller placement with the same proportions."""


def fitting(free: int, spared: int, each: int, most: int) -> int:
    """Number of processes of `each` bytes that fit into the free memory less `spared` bytes.

    >>> fitting(free=20_000, spared=4_000, each=70, most=512)
    228
    """
    return min(most, max(0, free - spared) // each)


def scaled(placement: str, processes: int) -> str:
    """The placement `nodes:first-last,...` scaled to this total number of processes.

    >>> scaled("0-1:0-200,2-3:201-511", 16)
    '0-1:0-5,2-3:6-15'
    """
    parts = [part.split(":") for part in placement.split(",")]
    ends = [int(ranks.split("-")[-1]) + 1 for _, ranks in parts]
    cuts = [0, *(round(processes * end / ends[-1]) for end in ends)]
    return ",".join(f"{nodes}:{cuts[part]}-{cuts[part + 1] - 1}" for part, (nodes, _) in enumerate(parts))
