"""Write the initial model of the app-world example: a tiny one, pretrained on demonstrations that are mostly wrong."""

import typer

from roost.app_world.tiny_model import write_app_world_model


def main(folder: str = "runs/app-world-model", seed: int = 0) -> None:
    print(write_app_world_model(folder, seed))


if __name__ == "__main__":
    typer.run(main)
