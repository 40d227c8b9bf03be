"""Supervised training: the learner of a job on given completions, without engines."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import psutil

from roost.config.data import TEACHER
from roost.config.train import TrainSettings
from roost.learner.forward import Head
from roost.learner.residence import WEIGHTS
from roost.learner.sample import NOT_GENERATED, Sample
from roost.placement.plan import Plan
from roost.placement.rules.placing import SUPERVISED
from roost.procs.signals import Stoppable, first_signal
from roost.procs.user_code import call
from roost.rollout.agents.chat import for_template
from roost.rollout.agents.chat_format import ChatFormat
from roost.rollout.episode import Scenario, Split, Task
from roost.rollout.episode_runner import UnmadeTask, task_of
from roost.rollout.order import Order, order_of, sample_seed
from roost.runtime.cluster import Cluster
from roost.runtime.worker import LaunchOptions
from roost.trainer.batch import Batch, minibatches
from roost.trainer.guards import Diverged, SkippedSteps, check_skipped, explained
from roost.trainer.learners import Learners, LearnerWorker, totals_of
from roost.trainer.metrics import memory_metrics, optimizer_metrics, time_metrics
from roost.trainer.records.checkpoints import HELD_OUT, Saver, TrainerState
from roost.trainer.records.run_folder import RunFolder
from roost.trainer.setup import PATIENT, devices_of, has_gpus, planned_learner, resolved_learner, scorer_group
from roost.trainer.watching import Watching
from roost.transport.context import Address, current_context
from roost.vision.image import files_of

ASSISTANT = "assistant"
REPORTED = (
    "loss/total",
    "loss/distillation",
    "grad/norm",
    "grad/noise_scale",
    "learning_rate",
    "entropy",
    "steps/skipped",
    "steps/outlier",
)


@dataclass(frozen=True)
class Conversations:
    """Tasks of a scenario as samples; only tokens of the assistant have loss.

    A task has `messages` with the assistant's turns, or `messages` or `prompt_text` and a completion in another column.
    """

    scenario: Scenario
    tokenizer: Any
    completion: str = ""  # column of the completion; by default the assistant's messages, else `answer`
    most_tokens: int | None = None
    learns_prompts: bool = False  # loss on the tokens of prompts, too

    def size(self, split: Split) -> int:
        return int(call(self.scenario.size, split))

    def order(self, seed: int) -> Order:
        """Order of the training tasks, as reinforcement learning would take them."""
        order: Order = call(order_of, self.scenario, Split.TRAIN, seed)
        return order

    def eval_sets(self, most: int, seed: int) -> dict[str, list[int]]:
        """Indices of each named set, or of one without a name; `most` of all sets together, if not 0."""
        size = self.size(Split.EVALUATION)
        named: dict[str, range] = getattr(self.scenario, "eval_sets", None) or {"": range(size)}
        order = call(order_of, self.scenario, Split.EVALUATION, seed) if size else None
        kept = {order.index(number) for number in range(min(most or size, size))} if order else set()
        return {name: [index for index in its if index in kept] for name, its in named.items()}

    def samples(self, split: Split, indices: Sequence[int]) -> tuple[list[Sample], int]:
        """Samples of the tasks at these indices, and the number left out because they are too long."""
        found = [sample for index in indices for sample in self.samples_of(task_of(self.scenario, split, index))]
        found = [replace(each, turns=np.maximum(each.turns, 0)) for each in found] if self.learns_prompts else found
        kept = [sample for sample in found if self.most_tokens is None or len(sample) <= self.most_tokens]
        return kept, len(found) - len(kept)

    def samples_of(self, task: Task) -> list[Sample]:
        """Samples of one task; several if the chat template changes earlier turns."""
        if isinstance(task, UnmadeTask):
            raise ValueError(f"{task.name}: {task.reason}")
        data = task.data
        messages = [for_template(message) for message in data.get("messages") or ()]
        if files_of(messages):
            raise ValueError(f"task {task.name!r:.80} has images, which supervised training does not read yet")
        has_turns = any(message["role"] == ASSISTANT for message in messages)
        chat = self._format(task, has_turns)
        if not has_turns or self.completion:
            text = self._completion(task)
            if chat is None:
                return [self._continued(task, text)]
            messages.append({"role": ASSISTANT, "content": text})
        if chat is None:
            raise ValueError(
                f"task {task.name!r:.80} has turns of the assistant, but prompts are finished text. Remove "
                "prompt_suffix and chat_template: false, or write train.completion: COLUMN"
            )
        return [_sample(pieces) for pieces in chat.conversations(messages, data.get("tools") or None)]

    def _format(self, task: Task, has_turns: bool) -> ChatFormat | None:
        """The scenario's own format, which has its template and arguments, else the tokenizer's.

        None where the completion follows a finished prompt.
        """
        own = getattr(self.scenario, "chat_format", None)
        if own is not None:
            found: ChatFormat | None = call(own, task)
            return found
        return None if task.data.get("prompt_text") and not has_turns else ChatFormat(self.tokenizer)

    def _continued(self, task: Task, text: str) -> Sample:
        """A finished prompt, its completion, and the end-of-sequence token."""
        prompt, chat, end = str(task.data["prompt_text"]), ChatFormat(self.tokenizer), self.tokenizer.eos_token_id
        own = getattr(self.scenario, "prompt_ids", None)
        shown = chat.ids(prompt) if own is None else call(own, task)
        return _sample([(shown, False), ((*chat.ids_after(prompt, text), *(() if end is None else (end,))), True)])

    def _completion(self, task: Task) -> str:
        column = self.completion or "answer"
        if task.data.get(column) is None:
            there = ", ".join(sorted(str(name) for name in task.data)) or "none"
            raise ValueError(
                f"task {task.name!r:.80} has no completion to learn: no assistant message, and no column {column}; "
                f"columns: {there}. Write train.completion: COLUMN"
            )
        return str(task.data[column])


def _sample(pieces: Sequence[tuple[Sequence[int], bool]]) -> Sample:
    """A sample with advantage 1; each piece of the assistant is a turn."""
    turns: list[int] = []
    for number, (ids, is_generated) in enumerate(pieces):
        turns += [number if is_generated else NOT_GENERATED] * len(ids)
    token_ids = np.array([token for ids, _ in pieces for token in ids], np.int64)
    return Sample(
        token_ids, np.array(turns, np.int64), np.zeros(len(turns), np.float32), np.ones(len(turns), np.float32)
    )


class SftTrainer(Stoppable):
    """All processes and state of one attempt at a supervised run. A step is `prompts_per_step` rows."""

    def __init__(
        self,
        cluster: Cluster,
        plan: Plan,
        settings: TrainSettings,
        run: RunFolder,
        state: TrainerState,
        watching: Watching,
        data: Conversations,
    ) -> None:
        super().__init__(watching.note)
        self.state = state
        self._cluster, self._plan, self._settings, self._run = cluster, plan, settings, run
        self._watching, self._data = watching, data
        self._name = next(name for name in SUPERVISED if name in {part.name for part in plan.components})
        self._recorder = current_context().recorder
        self._saver = Saver(run, settings, (), state.step, self._recorder)
        self._skipped = SkippedSteps()
        self._distillation = settings.learner.loss.distillation
        self._learners: Learners  # set by `launch`
        self._teacher: Learners | None = None
        self._began = time.perf_counter()
        self._ahead: asyncio.Task[tuple[list[Sample], int]]  # samples of the next step, read while the learner works
        # A teacher with devices of its own scores the rows of a step while those before it are learnt.
        self._scores_ahead = bool(self._distillation) and not devices_of(plan, self._name) & devices_of(plan, TEACHER)
        self._order = data.order(settings.seed)
        self._size = getattr(self._order, "used", 0) or data.size(Split.TRAIN)  # rows of an epoch

    def launch(self) -> None:
        """Start the learner. Not in an event loop, so that Ctrl-C interrupts a wait for devices."""
        self._watching.phase("launch")
        self._began, on_gpu = time.perf_counter(), has_gpus(self._plan)
        learner = resolved_learner(self._settings.learner, on_gpu)
        on_node = np.bincount(self._plan[self._name].table.nodes).max()
        threads = None if on_gpu else max(1, (os.cpu_count() or 1) // int(on_node))
        self._watching.note("starting learners")
        group = LearnerWorker.create_group(planned_learner(learner, self._plan[self._name]), Head.POLICY, threads)
        groups = {self._name: group}
        if self._distillation is not None:
            groups[TEACHER] = scorer_group(self._plan, TEACHER, learner, learner.optimizer, threads)
        options = {} if on_gpu else {name: LaunchOptions(env=PATIENT) for name in groups}
        launched = self._cluster.launch(self._plan, groups, options)
        self._learners = Learners(launched[self._name], self._plan[self._name].parallel, {}, _no_engine)
        if self._distillation is not None:
            self._teacher = Learners(launched[TEACHER], self._plan[TEACHER].parallel, {}, _no_engine)

    async def train(self) -> None:
        """Train with the processes of `launch` until the run ends or is stopped."""
        self._watching.phase("load")
        with first_signal(partial(self.stop, asyncio.current_task())):
            await asyncio.gather(*(each.ready() for each in (self._learners, self._teacher) if each is not None))
            if self.state.step:
                await self._learners.all("restore", str(self._saver.at(self.state.step).learner))
            if self._teacher is not None and not self._scores_ahead:
                await self._teacher.offload((WEIGHTS,))
            self._watching.note(f"learners are ready after {time.perf_counter() - self._began:.0f} s")
            self.is_starting = False
            try:
                await self._steps()
            finally:
                self._cluster.write_trace(self._run.trace_file, {Address("trainer", 0): self._recorder.drain()})
            self._watching.phase("save")
            await self._saver.finish([self._learners], self.state, self._skipped, self._watching.note)
            if not self.was_stopped:
                self._run.finish(self.state.step)

    async def _steps(self) -> None:
        every, last = self._settings.evaluation.eval_every, self._settings.step_count
        self._ahead = asyncio.create_task(self._read(self.state.step))
        try:
            while self.state.step < last and not self.was_stopped:
                if every and self.state.step % every == 0:
                    await self._evaluate()
                await self._step()
        finally:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)
        if not self.was_stopped:
            await self._evaluate()

    async def _read(self, step: int) -> tuple[list[Sample], int]:
        """Samples of the step after `step`, read and tokenized in a thread while the learner works."""
        rows = self._settings.rollout.prompts_per_step
        indices = [self._order.index(number) for number in range(step * rows, (step + 1) * rows)]
        samples, left_out = await asyncio.to_thread(self._data.samples, Split.TRAIN, indices)
        if self._scores_ahead and step < self._settings.step_count:
            samples = await self._with_teacher(samples)
        return samples, left_out

    async def _with_teacher(self, samples: list[Sample]) -> list[Sample]:
        """The samples with the teacher's distribution, if there is a teacher."""
        if self._teacher is None or self._distillation is None or any(each.distribution for each in samples):
            return samples
        if not self._scores_ahead:
            await self._learners.offload(())  # frees the memory that its allocator keeps
            await self._teacher.load((WEIGHTS,))
        vocabulary = len(self._data.tokenizer)
        found = await self._teacher.distributions(samples, self._distillation.top_k, vocabulary)
        if not self._scores_ahead:
            await self._teacher.offload((WEIGHTS,))  # as planned: the devices are the learner's while it learns
        return [replace(sample, distribution=each) for sample, each in zip(samples, found, strict=True)]

    async def _step(self) -> None:
        settings, began = self._settings, time.perf_counter()
        self._watching.phase("read")
        with self._recorder.timer("read", "work", True, step=self.state.step):
            samples, left_out = await self._ahead
        read = time.perf_counter()
        if self._teacher is not None:
            self._watching.phase("score")
            with self._recorder.timer("score", "work", True, step=self.state.step):
                samples = await self._with_teacher(samples)
        scored = time.perf_counter()
        self._ahead = asyncio.create_task(self._read(self.state.step + 1))
        metrics = await self._learn(samples)
        seconds = {"read": read - began, "learn": time.perf_counter() - scored}
        seconds |= {} if self._teacher is None else {"score": scored - read}
        state = TrainerState(self.state.step + 1, self.state.version + 1)
        trained = float(sum(sample.num_generated for sample in samples))
        metrics |= {
            "data/rows": float(self._size),
            "data/epoch": state.step * settings.rollout.prompts_per_step / self._size,
            "samples/learnt": float(len(samples)),
            "samples/left_out": float(left_out),
            "tokens/trained": trained,
            "tokens/mean": trained / max(1, len(samples)),
        }
        metrics |= time_metrics(seconds, time.perf_counter() - began, float(sum(map(len, samples))))
        metrics |= memory_metrics(self._name, await self._learners.all("memory"))
        metrics |= {} if self._teacher is None else memory_metrics(TEACHER, await self._teacher.all("memory"))
        metrics |= memory_metrics("driver", [{"rss": float(psutil.Process().memory_info().rss)}])
        try:
            check_skipped(self._skipped, settings)
            await self._saver.after_learning([self._learners], state, self._skipped, self._watching.note)
        except Diverged as error:
            self._watching.step_done(state, metrics, ())
            raise explained(error, settings, state.step, metrics) from None
        self.state = state
        self._watching.step_done(state, metrics, ())
        await self._saver.after_step([self._learners], state, self._skipped)

    async def _learn(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One optimizer step for each minibatch."""
        self._watching.phase("learn")
        batch = Batch(tuple(samples), ())
        learnt: list[Mapping[str, float]] = []
        with self._recorder.timer("learn", "work", True, step=self.state.step):
            seed = sample_seed(self._settings.seed, self.state.step)
            first = self.state.step * self._settings.minibatches
            count, shuffles = self._settings.minibatches, self._settings.shuffle_minibatches
            parts = minibatches(batch, count, seed, shuffles) if samples else ()
            for position, part in enumerate(parts, start=first):
                totals = totals_of(part, self._settings.sampling.max_new_tokens)
                if totals.tokens and not self._skipped.exceeds(self._settings):
                    learnt.append(await self._learners.learn(part, totals, position))
                    self._skipped = self._skipped.after(learnt[-1], self.state.step)
        found = optimizer_metrics(learnt, self._settings.learner.loss)
        metrics = {name: found[name] for name in REPORTED if name in found}
        if "loss/total" not in metrics:
            return metrics
        supervised = found["loss/policy"] if self._teacher is not None else metrics["loss/total"]
        return {"loss/supervised": supervised, **metrics}

    async def _evaluate(self) -> None:
        """Mean loss of a token on held-out rows, unless this step was evaluated before."""
        sets = self._data.eval_sets(self._settings.evaluation.eval_tasks, self._settings.seed)
        if not any(sets.values()) or self._run.has_evaluation(self.state.step):
            return
        self._watching.phase("evaluate")
        with self._recorder.timer("evaluate", "work", True, step=self.state.step):
            read = partial(self._data.samples, Split.EVALUATION)
            by_set = {name: (await asyncio.to_thread(read, rows))[0] for name, rows in sets.items()}
            samples = [sample for each in by_set.values() for sample in each]
            logprobs = await self._learners.score(samples)
        metrics = {"samples": float(len(samples)), HELD_OUT: _loss(samples, logprobs)}
        metrics["tokens"] = float(totals_of(samples, 1).tokens)
        if len(by_set) > 1:
            scored = iter(logprobs)
            metrics |= {
                f"{name}/{HELD_OUT}": _loss(each, list(islice(scored, len(each)))) for name, each in by_set.items()
            }
        self._watching.held_out(self.state, metrics)


def _loss(samples: Sequence[Sample], logprobs: Sequence[Any]) -> float:
    """Mean loss of a learnt token."""
    return -sum(float(array.sum()) for array in logprobs) / max(1, totals_of(samples, 1).tokens)


def _no_engine(url: str) -> Any:
    raise LookupError(f"supervised training has no engine at {url}")
