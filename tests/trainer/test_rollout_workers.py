import asyncio

from roost.config.train import LearnerSettings, TrainSettings
from roost.trainer import rollout_workers
from roost.trainer.watching import FailureFiles
from tests.rollout.script import Script, ran


class Closing(Script):
    """A scenario that is closed by what a test says."""

    def __init__(self, close):
        super().__init__(None)
        self.close = close


async def begun_and_over(scenario, folder):
    failures = FailureFiles(folder, print)
    settings = TrainSettings(LearnerSettings("model"))
    async with rollout_workers.open_stages({}, scenario, None, settings, True, failures) as stages:
        return stages.rewards


def test_a_scenario_that_hangs_as_it_closes_does_not_keep_the_run_from_ending(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(rollout_workers, "FINISH_LIMIT_S", 0.01)
    assert ran(begun_and_over(Closing(asyncio.Event().wait), tmp_path)) is None
    assert "the scenario did not close and is left behind: TimeoutError: timed out after 0.01 s" in caplog.text


def test_a_scenario_that_fails_to_close_is_logged_and_does_not_undo_the_run(caplog, tmp_path):
    async def close():
        raise OSError("the folder is gone")

    assert ran(begun_and_over(Closing(close), tmp_path)) is None
    assert "the scenario did not close and is left behind: OSError: the folder is gone" in caplog.text
