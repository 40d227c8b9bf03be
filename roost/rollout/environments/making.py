"""Environments from their configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roost.rollout.environments.blocking import BlockingEnvironments, is_blocking
from roost.rollout.environments.environment import Environments


def make_environments(
    config: Mapping[str, Any] | Environments, hardware: Sequence[Mapping[str, Any]] = ()
) -> Environments:
    """What a config names by `_target_`; where there is declared hardware, also made with its configs.

    Those that were made already are taken as they are. A class of plain, blocking functions is called in threads.
    """
    from hydra.utils import instantiate

    made: Environments
    if isinstance(config, Mapping):
        # Not through the config, where a `$` or a `???` in what was declared would mean something.
        more = {"hardware": [dict(each) for each in hardware]} if hardware else {}
        made = instantiate(dict(config), _convert_="all", _recursive_=False, _partial_=True)(**more)
    else:
        made = config
    return BlockingEnvironments(made) if is_blocking(made) else made
