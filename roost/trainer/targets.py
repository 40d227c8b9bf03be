"""Load the tokenizer, the scenario and the other classes that a config names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from roost.config.data import SCENARIO as DATA
from roost.config.findings import Findings, Where, bug, did_you_mean
from roost.config.job import Job
from roost.config.train import Objective, TrainSettings
from roost.config.train_read import setting_location, task_place
from roost.procs.user_code import call
from roost.rollout.check_target import SCENARIO, NotLocated, check_target, located, own_keys
from roost.rollout.data.scenario import PromptScenario
from roost.rollout.data.tables import DataError
from roost.rollout.episode import Scenario, Split, Task
from roost.rollout.rewards.config import Routing, check_answers, make_rewards

LIBRARY = "transformers"


def load_tokenizer(model: str, class_name: str = "") -> Any:
    """Load the tokenizer of a model, by its class name if that is known.

    `AutoTokenizer` imports torch where it is installed, which an agent's process does not need: it costs 270 MB and
    several seconds in each. Classes outside transformers still go through it, as they may be registered with it or come
    with the model.
    """
    if class_name.partition(".")[0] == LIBRARY:
        try:
            return located(class_name).from_pretrained(model)
        except (NotLocated, OSError, ValueError, TypeError, AttributeError):  # e.g. another version than the driver's
            pass
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def decoder(tokenizer: Any) -> Callable[[Sequence[int], bool], str]:
    """Return a function from token IDs to text; if the tokenizer raises, the text has the IDs."""

    def decode(token_ids: Sequence[int], has_special: bool) -> str:
        ids = [int(one) for one in token_ids]
        try:
            text = tokenizer.decode(ids, skip_special_tokens=not has_special, clean_up_tokenization_spaces=False)
        except Exception as error:  # a model's own tokenizer may raise anything; samples must not end the run
            return f"[{type(error).__name__} while decoding {ids}]"
        return str(text)

    return decode


def class_name_of(tokenizer: Any) -> str:
    """Dotted path of an object's class.

    >>> class_name_of(ValueError())
    'builtins.ValueError'
    """
    return f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"


def make_scenario(
    task: Mapping[str, Any], tokenizer: Any, where: Where, findings: Findings, opens: bool = True
) -> Scenario | None:
    """Create the scenario: call its class with the config's other keys and `tokenizer`.

    `opens`: also open its data and count its tasks. Processes that only run episodes do not need them.
    """
    from hydra.utils import instantiate

    if not check_target(task, where, SCENARIO, findings):
        return None
    try:
        # Not recursive: the scenario makes agents per episode, and environments may be in other processes.
        make = instantiate(dict(task), _partial_=True, _convert_="all", _recursive_=False)
        result = call(partial(make, tokenizer=tokenizer))
    except Exception as error:  # anything a user's class raises
        why = " ".join(f"{type(error).__name__}: {error}".split())
        fix = "correct the keys that it names"
        findings.error("RST-A010", where, f"{task['_target_']} cannot be made from these keys", why, fix)
        return None
    if not check_target(result, where, SCENARIO, findings):  # a function may return anything
        return None
    before = findings.num_errors
    if opens and hasattr(result, "open_data"):
        result.open_data(where, findings)
    wrong = _wrong_size(result) if opens and findings.num_errors == before else ""
    if wrong:
        fix = "give a whole number, 1 or more"
        findings.error(
            "RST-A011", where, f"{task['_target_']} has no tasks to learn from", f"size(Split.TRAIN) {wrong}", fix
        )
        return None
    if findings.num_errors > before:
        return None
    scenario: Scenario = result
    return scenario


def load_scenario(task: Mapping[str, Any], model: str, tokenizer_class: str = "") -> Scenario:
    """Create the scenario from names alone, in a worker; mistakes were found before launch."""
    findings = Findings()
    result = make_scenario(task, load_tokenizer(model, tokenizer_class), Where(), findings, opens=False)
    findings.raise_errors()
    if result is None:
        raise bug("there is no scenario, and no finding says why")
    return result


def _wrong_size(scenario: Scenario) -> str:
    """Describe what is wrong with the number of tasks; empty if nothing is."""
    try:
        size: Any = call(scenario.size, Split.TRAIN)
    except Exception as error:  # anything a user's class raises
        return f"raises {type(error).__name__}: {error}"
    return "" if isinstance(size, int) and size >= 1 else f"is {size!r}"


def check_vocabularies(settings: TrainSettings, job: Job, tokenizer: Any) -> None:
    """Raise ConfigError for teachers whose vocabulary lacks tokens of the policy's: they cannot score its samples."""
    if not settings.teachers:
        return
    findings = Findings()
    own, models = tokenizer.get_vocab(), {part.name: part.model.path for part in job.components}
    for teacher in settings.teachers:
        model, where = models.get(teacher.name), setting_location("teacher", job)
        if model is None:
            continue  # a finding of the plan
        try:
            other = load_tokenizer(model).get_vocab()
        except (OSError, ValueError):
            what, why = f"{model} has no tokenizer that can be loaded", "its vocabulary cannot be compared"
            findings.error("RST-T075", where, what, why, "copy the files of its tokenizer into its folder")
            continue
        missing = sorted((token for token, number in own.items() if other.get(token) != number), key=own.__getitem__)
        if missing:
            what = f"{model} has another vocabulary than {settings.learner.model}"
            why = f"{len(missing)} of {len(own)} tokens of the policy are not the teacher's, such as {missing[0]!r}"
            findings.error("RST-T075", where, what, why, "choose a teacher with the policy's tokenizer")
    findings.raise_errors()


def check_named(settings: TrainSettings, job: Job, findings: Findings) -> None:
    """Import the classes and functions that a job names, check their keys, and look at the first rows of its files."""
    before = findings.num_errors
    routing = check_targets(settings, job, findings)
    if findings.num_errors == before:
        check_rows(settings, job, routing, findings)


def check_targets(settings: TrainSettings, job: Job, findings: Findings) -> Routing:
    """Import the classes and functions that a job names, and check their keys; return the routing of its rewards."""
    check_target(settings.task, task_place(settings, job), SCENARIO, findings)
    # `elsewhere` checks the keys without creating the rewards.
    where = setting_location("rewards", job)
    return make_rewards(settings.rewards, where, findings, elsewhere=settings.rewards).routing


def check_rows(
    settings: TrainSettings, job: Job, routing: Routing, findings: Findings, scenario: Scenario | None = None
) -> None:
    """Check that the first rows have what rewards or supervised training read.

    Rows of files, and of data sets that `scenario` has loaded.
    """
    data = settings.task if settings.task.get("_target_") == DATA else settings.task.get("tasks")
    is_supervised = settings.objective is Objective.SFT
    if not (settings.completion if is_supervised else settings.rewards):
        return
    if not isinstance(data, Mapping) or data.get("_target_") != DATA:
        return
    keys = {key: value for key, value in own_keys(data).items() if key != "tokenizer"}
    with contextlib.suppress(DataError):  # opening the data reports it
        opened: Any = scenario if hasattr(scenario, "first_tasks") else PromptScenario(**keys)
        if is_supervised:
            _check_completions(settings.completion, opened.first_tasks(), setting_location("completion", job), findings)
        else:
            check_answers(settings.rewards, routing, opened.first_tasks(), setting_location("data", job), findings)


def _check_completions(column: str, tasks: Iterable[tuple[str, Task]], where: Where, findings: Findings) -> None:
    """Report a finding if none of the rows has a value in the column of completions."""
    first = None
    for place, task in tasks:
        if task.data.get(column) is not None:
            return
        first = first or (place, [str(name) for name in task.data])
    if first is not None:
        place, columns = first
        why = f"no row that was looked at has a value for it; the columns are {', '.join(columns)}"
        fix = did_you_mean(column, columns) or "write completion: COLUMN"
        findings.error("RST-T092", where, f"{place} has no {column}, the completion to learn", why, fix)
