"""Every setting of the section `train`: where it is kept, and the page that docs/training-settings.md is.

python -m tests.config.settings_page    writes the page anew
"""

from __future__ import annotations

from enum import EnumType
from pathlib import Path

from roost.config.job import Notation
from roost.config.notations import loop_train as training_loop
from roost.config.notations import roll_train as training_roll
from roost.config.notations.dialects import MADE_OF, UNLIKE
from roost.config.train import LearnerSettings, TrainSettings
from roost.config.train_keys import (
    DRAWING,
    FLAG,
    KEPT,
    KEYS,
    LOSS,
    MAPPING,
    MODEL,
    NUMBER,
    OPTIMIZER,
    RUN,
    TEXT,
    WHOLE,
    WORDS,
    Key,
)
from roost.config.train_read import kept

PAGE = Path(__file__).parents[2] / "docs" / "training-settings.md"
GROUPS = {
    "The run": RUN,
    "What is drawn": DRAWING,
    "The optimizer": OPTIMIZER,
    "What is learnt": LOSS,
    "The model and the engine": MODEL,
    "What is tried and kept": KEPT,
}
NEEDED = ("task", "model")
KINDS = {
    WHOLE: "whole number",
    NUMBER: "number",
    FLAG: "true or false",
    TEXT: "text",
    MAPPING: "mapping",
    WORDS: "list of words",
}
TITLES = {Notation.RLINF: "RLinf", Notation.ROLL: "ROLL", Notation.LOOP: "ml-loop"}


def settings_page() -> str:
    parts = [INTRODUCTION]
    plain = TrainSettings(LearnerSettings(""), name="")
    for title, keys in GROUPS.items():
        rows = ["| setting | kind | default | meaning | RLinf | ROLL | ml-loop |", "|---|---|---|---|---|---|---|"]
        rows += [_row(key, plain) for key in keys]
        parts.append(f"## {title}\n\n" + "\n".join(rows))
    parts.append(_defaults())
    parts.append(UNFOLLOWED)
    rows = [
        f"| {TITLES[notation]} | {', '.join(f'`{each.path}`' for each in UNLIKE[notation])} |" for notation in TITLES
    ]
    parts.append("\n".join(["| notation | keys |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _defaults() -> str:
    tables = (training_roll.DEFAULTS, training_loop.DEFAULTS)
    names = [key.name for key in KEYS if any(key.name in table for table in tables)]
    cells = [[f"`{name}`", *(f"`{table[name]}`" if name in table else "" for table in tables)] for name in names]
    return DEFAULTS.format(rows="\n".join(f"| {' | '.join(row)} |" for row in cells))


def _row(key: Key, plain: TrainSettings) -> str:
    cells = [f"`{key.name}`", _kind(key), _default(key, plain), key.meaning]
    cells += [_native(key, notation) for notation in TITLES]
    return f"| {' | '.join(cells)} |"


def _kind(key: Key) -> str:
    if isinstance(key.kind, str):
        least = f" from {key.least}" if key.kind == WHOLE and key.least else ""
        most = f" up to {key.most:g}" if key.most is not None else ""
        return KINDS[key.kind] + least + most
    words = list(key.kind) if isinstance(key.kind, EnumType) else key.kind
    return ", ".join(f"`{word}`" for word in words)


def _default(key: Key, plain: TrainSettings) -> str:
    if key.name in NEEDED:
        return "needed"
    value = kept(plain, key.name)
    if key.name == "minibatch_size" or value in (None, "", {}):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _native(key: Key, notation: Notation) -> str:
    same = [f"`{'.'.join(path)}`" for path in key.native(notation)]
    return "<br>".join([*same, *(f"from `{path}`" for path in MADE_OF[notation].get(key.name, ()))])


INTRODUCTION = """\
# Settings of a training run

<!-- Made by `python -m tests.config.settings_page` from the code. -->

A config that has a section `train` trains with `roost train`; without it, it only places. Each setting stands in that
section by its name here, or under the key that its notation already has for the same. Where both are written they must
agree. `null` is as good as left out, unless the setting says otherwise, and so is `-1` for a whole number. *from* means
that the setting follows from what the key says, such as `clip_range` from `algorithm.ratio_clip_eps`.
`engine` may be written in `train` beside a notation's own: so a job made for a cluster runs on a laptop.

The column *default* is Roost's own. A setting that a config leaves out has its notation's default where that differs:
see [below](#defaults-of-the-notations)."""

DEFAULTS = """\
## Defaults of the notations

| setting | ROLL | ml-loop |
|---|---|---|
{rows}

- ROLL: with `adv_estimator: gae`, `gae_lambda` is 0.95 and `value_clip` 0. Where `validation` or `val_env_manager` is
  there, `eval_every` is 10 and `eval_temperature` 0.95 (environments: the training temperature). A completion
  has `sequence_length` - `prompt_length` tokens (1024 if left out), or `response_length`; with environments
  `max_new_tokens`. Roost decides otherwise: `keep_checkpoints` is 3, where ROLL keeps all.
- ml-loop: ratios are clipped to [1/1.1, 1.1]; minibatches have 32 samples. The engine is vLLM where
  `llm.vllm_server` or `llm.inference_server_class` is there, and then `max_context` is `llm.vllm_server.max_model_len`.
  Roost decides otherwise: without `llm.lora_rank` all weights are trained, where ml-loop trains an adapter.
- RLinf: `dual_clip` is 3 with `actor.training_backend: fsdp` if `algorithm.clip_ratio_c` is left out (null: none). With
  `max_steps: -1` the run ends after `max_epochs` passes over the tasks; with both, after whichever is less. What else
  RLinf needs written has Roost's default. Roost decides otherwise: a run saves at its end also where `save_interval` is
  0 or less, and text tasks are evaluated as `val_check_interval` says.
- With `advantage_estimator: gae`, `whiten_advantages` is `tokens_biased` in RLinf's and ml-loop's notation if
  nothing says otherwise."""

UNFOLLOWED = """\
## Keys that Roost does not follow

These change how the other programs train, and Roost has nothing for them. A config that uses one is warned about.
Keys that the task replaces (data, rewards, environments) share one warning for each section; keys about speed, files or
logging, or that the other program ignores itself, share one note. `roost explain JOB keys` gives the reason for each,
`roost plan --json` has them as `unused_keys`. A key that no program knows is a warning with the nearest known key."""


if __name__ == "__main__":
    PAGE.write_text(settings_page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(PAGE.parents[1])}")
