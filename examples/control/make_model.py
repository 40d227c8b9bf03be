"""Write the initial model of a control example: a small transformer with random weights."""

from enum import StrEnum
from typing import Annotated

import typer

from roost.rollout.environments.control import write_control_model


class Example(StrEnum):
    CARTPOLE = "cartpole"
    ARM = "arm"


# As in the configs: the observed numbers, bins of each, and values of an action.
NUMBERS = {
    Example.CARTPOLE: {"numbers": 4, "bins": 16, "actions": 2},
    Example.ARM: {"numbers": 6, "bins": 16, "actions": 3},
}
FOLDERS = {Example.CARTPOLE: "runs/control-model", Example.ARM: "runs/arm-model"}


def main(example: Annotated[Example | None, typer.Argument()] = None, folder: str = "", seed: int = 0) -> None:
    """Write the model of one example, or of all, to FOLDER or to the folder that the config names."""
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    for each in Example if example is None else (example,):
        print(write_control_model(folder or FOLDERS[each], **NUMBERS[each], seed=seed, **sizes))


if __name__ == "__main__":
    typer.run(main)
