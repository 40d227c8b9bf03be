"""Write the model that the examples here train: a small transformer that knows nothing.

python examples/arithmetic/make_model.py [FOLDER]
"""

import sys

from transformers.utils import logging

from roost.rollout.arithmetic import write_arithmetic_model

if __name__ == "__main__":
    logging.disable_progress_bar()
    print("model:", write_arithmetic_model(sys.argv[1] if len(sys.argv) > 1 else "runs/arithmetic-model"))
