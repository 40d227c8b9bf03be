"""Reasons that several notations share for not following a key."""

from __future__ import annotations

from roost.config.known_keys.tables import Effect, Known

DATA = Known(Effect.TRAINING, "train.data and train.task give the prompts", "write it in train.data")
REWARD = Known(
    Effect.TRAINING, "train.task and train.rewards score the answers", "say it in train.task or train.rewards"
)
SAMPLING = Known(Effect.TRAINING, "Roost's engines have no such setting", "remove it")
NOT_FOLLOWED = Known(Effect.TRAINING, "Roost has nothing for it", "remove it, if the run is to be without it")
LOSS = Known(Effect.TRAINING, "Roost's loss has no such term", "remove it")
START = Known(
    Effect.TRAINING, "a run of Roost starts from the model, and goes on with roost train --resume", "remove it"
)
LOGGING = Known(Effect.FILES, "logging; roost train --metrics chooses where metrics go")
FILES = Known(Effect.FILES, "files; roost train --runs chooses where a run is kept")
MODEL = Known(Effect.BACKEND, "the model's own config.json says it")
HYDRA = Known(Effect.NOTHING, "it steers Hydra")
PLACING = Known(Effect.PLACING, "")
