"""Write the initial model of these examples: a small transformer with random weights.

python examples/arithmetic/make_model.py [FOLDER]
"""

import argparse

from transformers.utils import logging

from roost.rollout.arithmetic import write_arithmetic_model

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="runs/arithmetic-model", metavar="FOLDER")
    folder = parser.parse_args().folder
    logging.disable_progress_bar()
    print("model:", write_arithmetic_model(folder))
