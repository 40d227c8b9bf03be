"""Write the model and the data of this example: a small vision-language model that knows nothing, and coloured squares.

python examples/vision/make_files.py [FOLDER]
"""

import argparse
from pathlib import Path

from transformers.utils import logging

from roost.rollout.colours import write_colour_data, write_colour_model

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/vision-files"), metavar="FOLDER")
    folder = parser.parse_args().folder
    logging.disable_progress_bar()
    print("model:", write_colour_model(folder / "model"))
    print("data:", write_colour_data(folder / "train.jsonl", count=128, seed=1))
    print("data:", write_colour_data(folder / "held_out.jsonl", count=32, seed=2))
