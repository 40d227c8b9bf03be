"""Engines that die or hang: noticed, started again on the current version, and no request is lost with them."""

import asyncio
import copy
import os
import signal
from dataclasses import replace

import pytest

from roost.engines.command import EngineKind
from roost.engines.connect import connect
from roost.engines.fleet import Fleet, FleetSettings
from roost.engines.http_calls import TimeLimits
from roost.engines.members import EngineState, RestartLimit
from roost.engines.protocol import EngineLost, InFlight, Sampling
from roost.engines.server_process import LocalOwner
from roost.engines.supervision import Watchfulness
from roost.engines.weights.carriers import SharedMemoryCarrier
from roost.engines.weights.source import ModuleSource
from roost.engines.weights.update import LocalSender, WeightRoute
from tests.engines.live.conftest import spec_of
from tests.engines.live.policies import GREEDY, PROMPT, Policy
from tests.limits import HANG_S

pytestmark = pytest.mark.long

LONG = Sampling(max_tokens=120, temperature=0.0, ignore_eos=True)
EAGER = Watchfulness(every_s=0.2, missed=2, restarts=RestartLimit(most=20), waits_s=(0.5,))


def quick_to_doubt(spec, url):
    """A client that waits for short answers only, so that a hung server is noticed soon."""
    return connect(spec.kind, url, api_key=spec.api_key, limits=TimeLimits(answer=60.0, health=6.0))


class Scenarios:
    """Two engines that are killed in many ways, one after the other, and what they answer."""

    def __init__(self, model_folder, logs):
        self.policy = Policy(model_folder)
        self.reported = []
        owners = [LocalOwner(spec_of(EngineKind.TORCH, model_folder, name=name), logs) for name in ("one", "two")]
        self.fleet = Fleet(
            owners, FleetSettings(watchfulness=EAGER), report=self.reported.append, connect=quick_to_doubt
        )
        self.one, self.two = self.fleet.pool.members.values()
        self._runner = asyncio.Runner()

    def run(self, scenario):
        """One that hangs fails with where it was."""
        return self._runner.run(asyncio.wait_for(scenario, HANG_S))

    @property
    def version(self):
        return self.fleet.current_update.version if self.fleet.current_update else 0

    async def until(self, member, state):
        while member.state is not state:
            await asyncio.sleep(0.05)

    async def answers(self):
        """Answers of each engine itself."""
        made = [await member.engine.generate(PROMPT, GREEDY) for member in (self.one, self.two)]
        return [(completion.token_ids, completion.versions[0].version) for completion in made]

    def all_on(self, version):
        return [(self.policy.greedy(version), version)] * 2


def kill(member, how=signal.SIGKILL):
    os.kill(member.owner.pid, how)


@pytest.fixture(scope="module")
def scenarios(model_folder, tmp_path_factory):
    scenarios = Scenarios(model_folder, tmp_path_factory.mktemp("logs"))
    scenarios.run(scenarios.fleet.start())
    yield scenarios
    scenarios.run(scenarios.fleet.close())


def test_requests_move_to_another_engine(scenarios):
    fleet, one, two = scenarios.fleet, scenarios.one, scenarios.two

    async def run():
        requests = [
            asyncio.create_task(fleet.generate((*PROMPT, index), LONG, episode=str(index))) for index in range(4)
        ]
        while one.in_flight < 2 or two.in_flight < 2:
            await asyncio.sleep(0.01)
        kill(two)
        made = await asyncio.gather(*requests)
        await scenarios.until(two, EngineState.READY)
        return made

    for index, completion in enumerate(scenarios.run(run())):
        assert completion.token_ids == scenarios.policy.greedy(0, (*PROMPT, index), LONG.max_tokens)
    reported = [text for text in scenarios.reported if not text.startswith("waiting for")]
    assert reported == ["two is lost: its process is gone", "two is back, on version 0"]


class KillsOnTheWay(ModuleSource):
    """While the weights are sent, one of the engines is killed."""

    def __init__(self, module, kill):
        super().__init__(module)
        self._kills = [kill]

    def stream(self):
        for count, tensor in enumerate(super().stream()):
            if count == 12 and self._kills:
                self._kills.pop()()
            yield tensor


def test_killed_during_an_update(scenarios):
    number = scenarios.version + 1

    async def run():
        source = KillsOnTheWay(scenarios.policy.version(number), lambda: kill(scenarios.one))
        await scenarios.fleet.update(scenarios.policy.weight_update(number, source=source))
        await scenarios.until(scenarios.one, EngineState.READY)
        return await scenarios.answers()

    assert scenarios.run(run()) == scenarios.all_on(number)


def hung(member):
    kill(member, signal.SIGSTOP)


@pytest.mark.parametrize("in_flight", [InFlight.DRAIN, InFlight.HOLD])
def test_hung_during_an_update(scenarios, in_flight):
    """It is noticed by its silence and killed, so that the sender and the other engine do not wait for a time limit."""
    number, before = scenarios.version + 1, scenarios.one.owner.pid
    scenarios.reported.clear()

    async def run():
        source = KillsOnTheWay(scenarios.policy.version(number), lambda: hung(scenarios.one))
        await scenarios.fleet.update(scenarios.policy.weight_update(number, source=source), in_flight)
        await scenarios.until(scenarios.one, EngineState.READY)
        return await scenarios.answers()

    assert scenarios.run(run()) == scenarios.all_on(number)
    assert scenarios.one.owner.pid != before
    assert "one is lost: it does not answer; its server is killed, as an update was under way" in scenarios.reported
    waits = [text for text in scenarios.reported if text.startswith("waiting for one (it does not answer)")]
    assert f"to load version {number}, " in waits[0]
    failed = f"one failed to load version {number} by shared memory"
    described = next(text for text in scenarios.reported if text.startswith(failed))
    assert described.endswith("next: reload from disk")
    assert f"one is back, on version {number}" in scenarios.reported


@pytest.mark.parametrize("moment", ["before it sleeps", "asleep", "while it wakes"])
def test_hung_around_its_sleep(scenarios, moment):
    number, before = scenarios.version + 1, scenarios.one.owner.pid

    async def run():
        if moment == "before it sleeps":
            hung(scenarios.one)
        await scenarios.fleet.sleep(2)
        scenarios.fleet.learning_begins()
        if moment != "before it sleeps":
            hung(scenarios.one)
        if moment == "asleep":
            await scenarios.until(scenarios.one, EngineState.LOST)
        await scenarios.fleet.wake(scenarios.policy.weight_update(number))
        await scenarios.until(scenarios.one, EngineState.READY)
        return await scenarios.answers()

    assert scenarios.run(run()) == scenarios.all_on(number)
    assert scenarios.one.owner.pid != before


def test_killed_asleep(scenarios):
    """Somebody else holds its device while it sleeps, so it is not started before it is woken."""
    number = scenarios.version + 1

    async def run():
        await scenarios.fleet.sleep(2)
        scenarios.fleet.learning_begins()
        kill(scenarios.one)
        await scenarios.until(scenarios.one, EngineState.LOST)
        await asyncio.sleep(5 * EAGER.every_s)
        was_left_alone = scenarios.one.state is EngineState.LOST
        await scenarios.fleet.wake(scenarios.policy.weight_update(number))
        return was_left_alone, await scenarios.answers()

    assert scenarios.run(run()) == (True, scenarios.all_on(number))


def test_without_its_weights_it_waits_for_the_next_update(scenarios):
    """The learner has gone on, and nothing was written: the version is not to be had any more."""
    number = scenarios.version + 1

    async def run():
        await scenarios.fleet.update(scenarios.policy.weight_update(number))
        scenarios.fleet.learning_begins()
        kill(scenarios.one)
        await scenarios.until(scenarios.one, EngineState.BEHIND)
        meanwhile = await scenarios.fleet.generate(PROMPT, GREEDY)
        await scenarios.fleet.update(scenarios.policy.weight_update(number + 1))
        return meanwhile.token_ids, await scenarios.answers()

    scenarios.reported.clear()
    assert scenarios.run(run()) == (scenarios.policy.greedy(number), scenarios.all_on(number + 1))
    assert "one is running again; it gets requests after the next weight sync" in scenarios.reported
    assert not [text for text in scenarios.reported if "on version 0" in text]


def test_an_engine_that_somebody_gave_other_weights_is_replaced(scenarios, tmp_path):
    """A request with the key can still replace weights; whoever asks for the check learns which engine it was."""
    number, policy = scenarios.version + 1, scenarios.policy

    async def run():
        await scenarios.fleet.weights.calibrate(policy.probe(number - 1))
        await scenarios.fleet.update(policy.weight_update(number))
        before = await scenarios.fleet.weights.wrong()
        other = policy.written(number + 7, tmp_path).checkpoint
        await scenarios.two.engine.load_checkpoint(other, number)
        wrong = await scenarios.fleet.weights.wrong()
        await scenarios.fleet.replace_wrong(wrong)
        await scenarios.until(scenarios.two, EngineState.READY)
        return before, wrong, await scenarios.fleet.weights.wrong(), await scenarios.answers()

    before, (wrong,), after, answers = scenarios.run(run())
    assert (before, after, answers) == ([], [], scenarios.all_on(number))
    assert wrong.name == "two" and "is off by" in wrong.why and "with equal weights it was off by" in wrong.why


def test_a_hung_engine_is_replaced(scenarios, tmp_path):
    number = scenarios.version + 1

    async def run():
        await scenarios.fleet.update(scenarios.policy.written(number, tmp_path))
        before = scenarios.one.owner.pid
        requests = [asyncio.create_task(scenarios.fleet.generate(PROMPT, LONG)) for _ in range(4)]
        while scenarios.one.in_flight < 2:
            await asyncio.sleep(0.01)
        kill(scenarios.one, signal.SIGSTOP)
        made = await asyncio.gather(*requests)
        await scenarios.until(scenarios.one, EngineState.READY)
        return before, made, await scenarios.answers()

    before, made, answers = scenarios.run(run())
    assert scenarios.one.owner.pid != before
    assert {completion.token_ids for completion in made} == {scenarios.policy.greedy(number, PROMPT, LONG.max_tokens)}
    assert answers == scenarios.all_on(number)
    assert "one is lost: it does not answer" in scenarios.reported


class Joining:
    """A third engine that joins the two and leaves them."""

    def __init__(self, scenarios, logs):
        self.fleet, self._scenarios = scenarios.fleet, scenarios
        self.owner = LocalOwner(spec_of(EngineKind.TORCH, scenarios.policy.folder, name="three"), logs)

    @property
    def member(self):
        return self.fleet.pool.members["three"]

    async def answer(self):
        """Tokens and version of the third engine itself."""
        made = await self.member.engine.generate(PROMPT, GREEDY)
        return made.token_ids, made.versions[0].version

    async def leave(self, in_flight):
        """Remove it while it has requests; return their completions."""
        member = self.member
        requests = [
            asyncio.create_task(self.fleet.generate((*PROMPT, index), LONG, episode=f"{in_flight} {index}"))
            for index in range(6)
        ]
        while not member.in_flight:
            await asyncio.sleep(0.01)
        await self.fleet.remove(["three"], in_flight)
        assert not await self.owner.is_running() and member.in_flight == 0
        assert "three" not in self.fleet.status and "three" not in self.fleet.pool.router._homes.values()
        assert not [task for task, of in self.fleet._supervisor._tasks.items() if of is member]
        return [completion.token_ids for completion in await asyncio.gather(*requests)]

    def wanted(self, number):
        """Completions of the requests of `leave`."""
        return [self._scenarios.policy.greedy(number, (*PROMPT, index), LONG.max_tokens) for index in range(6)]


def test_an_engine_joins_with_the_current_version_and_its_requests_move_when_it_leaves(scenarios, tmp_path):
    number, joining = scenarios.version + 1, Joining(scenarios, tmp_path)

    async def run():
        await scenarios.fleet.update(scenarios.policy.weight_update(number))
        state = await scenarios.fleet.add(joining.owner)
        with pytest.raises(ValueError, match="has an engine three already"):
            await scenarios.fleet.add(joining.owner)
        return state, await joining.answer(), await joining.leave(InFlight.DROP)

    answer = scenarios.policy.greedy(number), number
    assert scenarios.run(run()) == (EngineState.READY, answer, joining.wanted(number))


def test_an_engine_that_joins_while_the_learner_learns_waits_for_the_next_update(scenarios, tmp_path):
    number, joining = scenarios.version + 1, Joining(scenarios, tmp_path)

    async def run():
        await scenarios.fleet.update(scenarios.policy.weight_update(number))
        scenarios.fleet.learning_begins()
        state = await scenarios.fleet.add(joining.owner)
        await scenarios.fleet.update(scenarios.policy.weight_update(number + 1))
        return state, await joining.answer(), await joining.leave(InFlight.DRAIN)

    answer = scenarios.policy.greedy(number + 1), number + 1
    assert scenarios.run(run()) == (EngineState.BEHIND, answer, joining.wanted(number + 1))


class GoesOnAfterWriting(LocalSender):
    """The learner begins its next step while the weights are written."""

    learning_begins = None

    async def write(self, model, folder):
        await super().write(model, folder)
        self.learning_begins()


def test_an_engine_that_joins_never_gets_weights_of_the_learners_next_step(scenarios, tmp_path):
    """Of the version on disk it gets that one, and what may be of a later one is not kept."""
    number, joining, fleet = scenarios.version + 1, Joining(scenarios, tmp_path), scenarios.fleet
    learner = copy.deepcopy(scenarios.policy.version(number))
    written = GoesOnAfterWriting(scenarios.policy.source(number + 1), WeightRoute.RELOAD, SharedMemoryCarrier)
    written.learning_begins = fleet.learning_begins

    async def run():
        await fleet.update(scenarios.policy.weight_update(number, source=ModuleSource(learner)))
        await fleet._current.sync_again().write_for([scenarios.one])  # as for an engine that was started again
        fleet.learning_begins()
        learner.load_state_dict(scenarios.policy.version(number + 1).state_dict())
        found = [await fleet.add(joining.owner), await joining.answer()]
        await fleet.remove(["three"])
        await fleet.update(scenarios.policy.weight_update(number + 1))
        fleet._current.set(replace(fleet.current_update, sender=written), tmp_path / "late")
        found += [await fleet.add(joining.owner), (tmp_path / "late").exists()]
        await fleet.remove(["three"])
        return found

    wanted = [EngineState.READY, (scenarios.policy.greedy(number), number), EngineState.BEHIND, False]
    assert scenarios.run(run()) == wanted


def test_an_engine_that_joins_during_an_update_or_a_sleep_gets_the_same_version_as_the_others(scenarios, tmp_path):
    number, joining = scenarios.version + 1, Joining(scenarios, tmp_path)

    async def run():
        adding = asyncio.create_task(scenarios.fleet.add(joining.owner))
        await asyncio.sleep(0)  # it is being started
        await scenarios.fleet.update(scenarios.policy.weight_update(number))
        joined = joining.member.state  # the update did not wait for it
        found = [joined, await adding, await joining.answer()]
        await scenarios.fleet.remove(["three"])
        await scenarios.fleet.sleep(2)
        scenarios.fleet.learning_begins()
        found.append(await scenarios.fleet.add(joining.owner))
        found.append(await joining.owner.is_running())
        await scenarios.fleet.wake(scenarios.policy.weight_update(number + 1))
        found.append(await joining.answer())
        await scenarios.fleet.remove(["three"])
        return found

    first, second = ((scenarios.policy.greedy(version), version) for version in (number, number + 1))
    starting = EngineState.STARTING, EngineState.READY, first
    assert scenarios.run(run()) == [*starting, EngineState.LOST, False, second]


def test_engines_that_were_lost_too_often_are_given_up(scenarios):
    scenarios.fleet._supervisor._how = replace(EAGER, restarts=RestartLimit(most=0, within_s=60.0))

    async def run():
        for member in (scenarios.one, scenarios.two):
            member.restarts.clear()
            kill(member)
            await scenarios.until(member, EngineState.FAILED)
        await scenarios.fleet.generate(PROMPT, GREEDY)

    with pytest.raises(EngineLost, match=r"every engine has failed: one is failed \(lost 1 time within 60 s, the last"):
        scenarios.run(run())
    assert "one is abandoned: lost 1 time within 60 s, the last time because its process is gone" in scenarios.reported
