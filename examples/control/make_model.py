"""Write the model that the control examples begin with: a small transformer that knows nothing."""

import typer

from roost.rollout.environments.control import write_control_model


def main(folder: str = "runs/control-model", seed: int = 0) -> None:
    """Four numbers of 16 bins each are observed, and two actions can be said."""
    print(write_control_model(folder, numbers=4, bins=16, actions=2, seed=seed, hidden_size=64, intermediate_size=128))


if __name__ == "__main__":
    typer.run(main)
