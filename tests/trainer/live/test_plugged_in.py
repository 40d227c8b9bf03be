"""User code: an agent by a class, a file and one override; and the app world it acts in."""

import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from roost.app_world.tiny_model import write_app_world_model
from roost.trainer.records.run_folder import RunFolder
from tests.cli.terminal import run
from tests.limits import HANG_S

ROOT = Path(__file__).parents[3]
ROOST = [sys.executable, "-c", "from roost.cli.main import run; run()"]
CHOOSES = "appworld/agent@rl.scenario_runner.appworld_config.agent=my_agent"

AGENT = '''
from roost.rollout.agents.appworld_agent import AppworldAgent, IPythonMessage, UserMessage


class MyAgent(AppworldAgent):
    """As the documents of ml-loop have it: what is said next is code, and what was printed comes back."""

    def __init__(self, task, llm, opening):
        self.llm, self.messages = llm, [UserMessage(opening + task.instruction)]

    def next_code_block(self, output, world):
        if output is not None:
            self.messages.append(IPythonMessage(output))
        said = self.llm.generate(self.messages)
        self.messages.append(said)
        open("agents.txt", "a").write(f"{len(said.generated_tokens)} {len(said.generated_token_logprobs)}\\n")
        return said.content.removeprefix("```python\\n").removesuffix("\\n```")

    def history_as_messages(self, last_execution_output):
        return [*self.messages, IPythonMessage(last_execution_output)]
'''
LEARNS_FAST = ("rl.params.total_iterations=8", "train.eval_tasks=12")
JOB = """
defaults: [/global@_global_: appworld, _self_]
rl:
  gpu_allocation: {learning_gpus: [0], inference_gpus: [1]}
  params:
    total_iterations: 2
    scenarios_per_iteration: 4
    rollouts_per_scenario: 4
    minibatch_size: 16
    epochs_per_iteration: 1
  optimization: {optimizer: {lr: 0.001}}
  scenario_runner:
    appworld_config: {max_interactions: 1}
    tasks:
      _target_: roost.app_world.serving.tasks.AppWorldTasks
      kinds: [jot_note, jot_task, delete_file]
    environment:
      _target_: roost.app_world.serving.client.AppWorldEnvironments
      shows_supervisor: false
llm: {base_model_path: model, vllm_class: {max_new_tokens: 8}}
train: {eval_tasks: 2, engine_options: {max_context: 128}}
"""


@pytest.fixture(scope="module", autouse=True)
def machine():
    """No Ray of the tests' own: each run starts one."""


@pytest.fixture
def folder(tmp_path):
    """A user's own, with nothing of Roost's in it."""
    (tmp_path / "appworld" / "agent").mkdir(parents=True)
    (tmp_path / "appworld" / "agent" / "my_agent.yaml").write_text('_target_: my_agents.MyAgent\nopening: ""\n')
    (tmp_path / "my_agents.py").write_text(AGENT)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


@pytest.fixture(scope="module")
def untaught(tmp_path_factory):
    return write_app_world_model(tmp_path_factory.mktemp("models") / "untaught", batches=0)


def train(folder, *overrides, job="job.yaml"):
    return subprocess.run(
        [*ROOST, "train", str(job), *overrides, "--name", "run"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


@pytest.mark.long
def test_an_agent_is_a_class_a_file_and_one_override(folder):
    write_app_world_model(folder / "model", correct_share=1.0)
    done = train(folder, CHOOSES)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = RunFolder.open(folder / "runs" / "run").steps()
    assert [step["samples/finished"] for step in steps] == [16.0, 16.0]
    assert steps[0]["reward/mean"] > 0.5, "it was shown how the tasks are done"
    reported = [line.split() for line in (folder / "agents.txt").read_text().splitlines()]
    assert len(reported) == 34 and all(tokens == logprobs for tokens, logprobs in reported)


@pytest.mark.parametrize(
    ("written", "described"),
    [
        pytest.param("_target_: my_agents.MyAgnt", ["did you mean MyAgent?"], id="class"),
        pytest.param(
            "_target_: my_agents.MyAgent\nopenin: 1", ["opening is missing", "did you mean opening?"], id="keys"
        ),
    ],
)
def test_what_is_wrong_with_an_agent_is_found_before_launch(folder, untaught, written, described, monkeypatch):
    (folder / "appworld" / "agent" / "my_agent.yaml").write_text(written)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    done = run("train", "job.yaml", CHOOSES, f"llm.base_model_path={untaught}", "--name", "run", width=300)
    sys.modules.pop("my_agents", None)  # the next test has another
    assert done.exit_code == 1, done.output
    assert all(text in done.output for text in described), done.output
    assert str(folder / "appworld" / "agent" / "my_agent.yaml") in done.output
    assert not (folder / "runs" / "run").exists()


@pytest.mark.long
def test_an_agent_improves_in_the_app_world(tmp_path):
    """The example, cut short: what the tiny model does at random at first becomes what it is asked for."""
    write_app_world_model(tmp_path / "model")
    example = ROOT / "examples" / "app_world" / "job.yaml"
    done = train(tmp_path, *LEARNS_FAST, f"llm.base_model_path={tmp_path / 'model'}", job=example)
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = [step["reward/mean"] for step in RunFolder.open(tmp_path / "runs" / "run").steps()]
    assert mean(rewards[-3:]) > mean(rewards[:2]) + 0.2, rewards
