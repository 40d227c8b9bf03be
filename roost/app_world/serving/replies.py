"""Server messages: tasks, reports and executions in the form that clients get."""

from __future__ import annotations

from typing import Any

from roost.app_world.evaluate import Check, Report
from roost.app_world.tasks.task import AppTask
from roost.sandbox.execution import Execution


class Refused(Exception):
    """A request that cannot be served; the status tells whose fault it is, the message what to change."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


NOTHING_PRINTED = "[Nothing was printed.]"
STATE_IS_KEPT = "[What was done in the apps is kept.]"
GUARD, EARNED = "no_op_pass", "no_op_fail"  # result of the test if the agent does nothing


def task_reply(task: AppTask) -> dict[str, Any]:
    """The part of a task that its agent may see.

    >>> from roost.app_world.tasks.task_set import make_task
    >>> reply = task_reply(make_task("391925b_1"))
    >>> reply["supervisor"]["first_name"], sorted(reply)
    ('Quinn', ['datetime', 'instruction', 'supervisor', 'task_id'])
    """
    profile = task.initial["profile"]
    first, _, last = profile["name"].partition(" ")
    return {
        "task_id": task.id,
        "instruction": task.instruction,
        "supervisor": {
            "first_name": first,
            "last_name": last,
            "email": profile["email"],
            "phone_number": profile["phone"],
        },
        "datetime": f"{task.initial['today']}T00:00:00",
    }


def report_reply(task: AppTask, report: Report) -> dict[str, Any]:
    """The report of a task, for scoring."""
    return {
        "success": report.success,
        "difficulty": task.difficulty,
        "num_tests": len(report.checks),
        "passes": [_check_reply(check) for check in report.passes],
        "failures": [{**_check_reply(check), "trace": check.failure} for check in report.failures],
    }


def execution_text(execution: Execution) -> str:
    """Output of a piece of code as the agent sees it.

    >>> execution_text(Execution("", None, 0.1))
    '[Nothing was printed.]'
    """
    shown = execution.output or NOTHING_PRINTED
    is_fatal = execution.error is not None and execution.error.is_fatal
    return f"{shown}\n{STATE_IS_KEPT}" if is_fatal else shown


def _check_reply(check: Check) -> dict[str, str]:
    return {"requirement": check.name, "label": GUARD if check.is_guard else EARNED}
