"""The command line as a person uses it: a terminal without colours, and files to point it at."""

import json

from typer.testing import CliRunner

from roost.cli.main import build_app

APP = build_app()


def run(*arguments, width=100):
    runner = CliRunner(env={"COLUMNS": str(width), "NO_COLOR": "1", "TERM": "dumb"})
    return runner.invoke(APP, [str(argument) for argument in arguments])


def lines_of(text):
    return [line.rstrip() for line in text.splitlines()]


def cluster_yaml(nodes, **placement):
    """A config of nodes of 8 accelerators."""
    return json.dumps({"cluster": {"num_nodes": nodes, "num_gpus_per_node": 8, "component_placement": placement}})


def write(folder, text, name="job.yaml"):
    file = folder / name
    file.write_text(text)
    return file
