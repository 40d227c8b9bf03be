"""Small jobs that really train: learner, engines and Ray on this machine."""

import io
import json
from pathlib import Path

from rich.console import Console
from safetensors.torch import load_file

from roost.config.compose import load
from roost.config.findings import Findings
from roost.config.notations.notation import read_job
from roost.trainer.report.live_view import LiveView
from roost.trainer.train import RunOptions, train
from tests.local_ray import ACCELERATORS

ARITHMETIC = {"_target_": "roost.rollout.arithmetic.Arithmetic", "largest": 2}
OFFLOADS = {"offload_weight": True, "offload_grad": True, "offload_optimizer": True}


def config(model, placement, task=None, actor=None, **train_keys):
    """A job in RLinf's notation with Roost's own settings."""
    settings = {
        "model": str(model),
        "task": {**ARITHMETIC, **(task or {})},
        "max_steps": 3,
        "prompts_per_step": 4,
        "num_generations": 4,
        "max_new_tokens": 3,
        "learning_rate": 1e-3,
        "engine_options": {"max_context": 64},
        **train_keys,
    }
    cluster = {"num_nodes": 1, "num_gpus_per_node": ACCELERATORS, "component_placement": placement}
    return {"cluster": cluster, "actor": dict(actor or {}), "train": settings}


def job_of(values):
    findings = Findings()
    source = load(values, (), findings)
    job = read_job(source, findings)
    findings.raise_errors()
    return job


class NotingView(LiveView):
    """Keeps what is noted."""

    notes: list

    def note(self, text):
        self.notes.append(text)
        super().note(text)


def trained(values, folder, resumes=False, reported=None, from_step=None, notes=None, address=None):
    """Train to the end; the outcome has the run's folder."""

    def view(steps, first):
        view = NotingView(steps, console, first)
        view.notes = notes if notes is not None else []
        return view

    console = Console(file=io.StringIO())
    say = reported.append if reported is not None else (lambda text: None)
    return train(
        job_of(values),
        RunOptions(Path(folder), resumes, address, from_step=from_step),
        say,
        view,
        lambda plan: None,
    )


def weights_of(run):
    return load_file(run.policy / "model.safetensors")


def learnt_groups(run):
    """Groups that each step learnt from."""
    return {record["step"]: record["groups"] for record in run.learnt_lines}


def spans_of(run, name, component=None):
    """Spans of a name in the trace, each as (start, end), in order; times in microseconds."""
    trace = json.loads(run.trace_file.read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    found = [
        (event["ts"], event["ts"] + event["dur"])
        for event in trace
        if event["ph"] == "X"
        and event["name"] == name
        and (component is None or lanes[event["tid"]].startswith(component))
    ]
    return sorted(found)
