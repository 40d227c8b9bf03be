"""Job files: golden files, what shells and schemas say of them, and what cannot be rendered."""

import os
import subprocess
from dataclasses import replace
from itertools import product

import pytest
import yaml

import roost
from roost.schedulers.job_files import CannotRender, Container, JobOptions, Scheduler, notes_of, render, template_of
from roost.schedulers.node_requests import ProcessSizes, requests_of
from tests.cli.terminal import run
from tests.schedulers.golden_files import EXAMPLE, FOLDER, cases, heterogeneous, options, rendered, uniform

NAMES = sorted(cases())


def roll(**more):
    return roost.plan({"num_gpus_per_node": 4, "actor_train": {"device_mapping": "list(range(0,4))"}, **more})


@pytest.mark.parametrize("name", NAMES)
def test_files_are_what_they_were(name):
    assert rendered(name) == (FOLDER / name).read_text(), "run: python -m tests.schedulers.golden_files"


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith((".sbatch", ".sh"))])
def test_shells_can_read_them(name):
    done = subprocess.run(["bash", "-n", str(FOLDER / name)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith((".yaml", ".yml"))])
def test_shell_parts_of_yaml_files_can_be_read(name):
    data = yaml.safe_load((FOLDER / name).read_text())
    script = data.get("run") or "\n".join(data.get("commands", ())) or data["spec"]["entrypoint"]
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_node_of_the_plan_is_requested_once():
    requests = heterogeneous().requests
    assert [(request.label, request.ranks, request.accelerators) for request in requests] == [
        ("a800", "0-7", 8),
        ("4090", "8-15", 8),
        ("franka", "16-17", 0),
    ]
    # 100 agents on each of nodes 0 to 3; 8 accelerators of 4 CPUs; 2 for Ray; the driver's 4 on node 0.
    assert [request.cpus for request in requests] == [100 + 8 * 4 + 2 + 4, 8 * 4 + 2, 1 + 2]


def test_pods_of_a_rayjob_are_the_nodes_of_the_plan():
    """The fields that RayJob v1 requires, and pods that add up to the plan."""
    job = yaml.safe_load(rendered("heterogeneous.rayjob.yaml"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    assert spec["submissionMode"] == "HTTPMode" and spec["shutdownAfterJobFinishes"] is True
    head, workers = spec["rayClusterSpec"]["headGroupSpec"], spec["rayClusterSpec"]["workerGroupSpecs"]
    assert 1 + sum(group["replicas"] for group in workers) == 18
    names = [group["groupName"] for group in workers]
    assert names == ["a800", "4090", "franka"]
    ranks = set()
    for group in [head, *workers]:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == container["resources"]["requests"]
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        shared = next(volume for volume in pod["volumes"] if volume["name"] == "shared-memory")
        assert shared["emptyDir"]["medium"] == "Memory"
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert container["lifecycle"]["preStop"]["exec"]["command"]
        text = next(variable["value"] for variable in container["env"] if variable["name"] == "ROOST_NODE_RANK")
        first, _, last = text.partition("-")
        assert len(range(int(first), int(last or first) + 1)) == group.get("replicas", 1)
        ranks |= set(range(int(first), int(last or first) + 1))
    assert ranks == set(range(18))


def test_sizes_of_processes_change_the_request():
    plan = roll(rewards={"code_sandbox": {"world_size": 8}})
    (usual,), (small,) = (
        requests_of(plan, sizes).requests
        for sizes in (ProcessSizes(), ProcessSizes({"reward.code_sandbox": 0.25}, {"reward.code_sandbox": 0.25}))
    )
    assert (usual.cpus, small.cpus) == (30, 24)
    assert usual.memory_gb > small.memory_gb


def test_unused_nodes_at_the_end_are_not_requested_unless_the_config_counts_them():
    plan = roost.plan({"num_gpus_per_node": 4, "actor_train": {"device_mapping": "[0, 1]"}},
                      {"nodes": [{"count": 5, "accelerators": 4}]})  # fmt: skip
    few, all_of_them = requests_of(plan), requests_of(plan, num_nodes=5)
    assert (few.nodes, all_of_them.nodes) == (1, 5)
    assert "2 of 4 accelerators are in use" in few.notes[0]


def test_memory_is_not_more_than_a_machine_has():
    plan = roost.plan({"num_gpus_per_node": 4, "actor_train": {"device_mapping": "list(range(0,4))"}},
                      {"nodes": [{"accelerators": 4, "host_memory_gb": 32.5}]})  # fmt: skip
    allocation = requests_of(plan)
    assert allocation.requests[0].memory_gb == 32
    assert "host memory" in allocation.notes[-1]


def test_simulated_accelerators_are_not_requested():
    plan = roost.plan({"num_gpus_per_node": 2, "actor_train": {"device_mapping": "[0, 1]"}},
                      {"nodes": [{"accelerators": 2, "accelerator_type": "SIMULATED"}]})  # fmt: skip
    text = render(Scheduler.SLURM, requests_of(plan), options())
    assert "--gpus" not in text and "--cpus-per-task=14" in text


@pytest.mark.parametrize(
    ("scheduler", "allocation", "more", "message"),
    [
        pytest.param(Scheduler.SKYPILOT, heterogeneous, {}, "3 kinds: a800", id="skypilot-is-uniform"),
        pytest.param(Scheduler.DSTACK, heterogeneous, {}, "slurm, kuberay or ssh", id="dstack-is-uniform"),
        pytest.param(Scheduler.KUBERAY, uniform, {}, "--image", id="pods-need-an-image"),
        pytest.param(Scheduler.SSH, uniform, {"hosts": ("a",)}, "2 nodes, and there are 1 host", id="too-few-hosts"),
        pytest.param(Scheduler.SSH, uniform, {}, "no hosts", id="no-hosts"),
        pytest.param(Scheduler.SLURM, uniform, {"time": "tomorrow"}, "is not a time limit", id="time"),
        pytest.param(Scheduler.SLURM, uniform, {"mounts": ("/a:/b",)}, "--image", id="mount-without-image"),
        pytest.param(
            Scheduler.KUBERAY, uniform, {"image": "i", "mounts": ("shared",)}, "SOURCE:/PATH", id="mount-without-path"
        ),
        pytest.param(
            Scheduler.KUBERAY, uniform, {"image": "i", "mounts": ("c:/data",)}, "--workdir below", id="no-folder"
        ),
        pytest.param(
            Scheduler.DSTACK, uniform, {"scheduler_options": ("regions",)}, "KEY=VALUE", id="option-without-value"
        ),
        pytest.param(
            Scheduler.SLURM, uniform, {"scheduler_options": ("foo bar",)}, "is not KEY=VALUE", id="option-of-two-words"
        ),
        pytest.param(
            Scheduler.SLURM, uniform, {"scheduler_options": ("=gpu",)}, "is not KEY=VALUE", id="option-without-key"
        ),
        pytest.param(
            Scheduler.SLURM,
            heterogeneous,
            {"scheduler_options": ("frank:qos=a",)},
            "did you mean franka",
            id="option-of-no-group",
        ),
        pytest.param(
            Scheduler.SSH,
            uniform,
            {"hosts": ("a", "b"), "scheduler_options": ("a=b",)},
            "leave it out",
            id="option-of-ssh",
        ),
    ],
)
def test_what_cannot_be_given_is_said(scheduler, allocation, more, message):
    with pytest.raises(CannotRender, match=message):
        render(scheduler, allocation(), options(**more))


def test_a_cloud_needs_the_name_of_the_card():
    with pytest.raises(CannotRender, match="the plan does not say which card"):
        render(Scheduler.SKYPILOT, requests_of(roll()), options())


CARDS = [
    pytest.param(Scheduler.SKYPILOT, "resources.accelerators=H100", "H100:4", id="name"),
    pytest.param(Scheduler.SKYPILOT, "resources.accelerators=H100:4", "H100:4", id="with-the-count"),
    pytest.param(Scheduler.SKYPILOT, "resources.accelerators={H100: 4, H200: 4}", {"H100": 4, "H200": 4}, id="any-of"),
    pytest.param(Scheduler.SKYPILOT, "resources.accelerators=H100:2", None, id="another-count"),
    pytest.param(Scheduler.DSTACK, "resources.gpu.name=H100", "H100", id="dstack"),
]


@pytest.mark.parametrize(("scheduler", "option", "found"), CARDS)
def test_an_option_names_the_card(scheduler, option, found):
    if found is None:
        with pytest.raises(CannotRender, match="the plan needs 4 accelerators on a node; write H100:4"):
            render(scheduler, requests_of(roll()), options(scheduler_options=(option,)))
        return
    resources = yaml.safe_load(render(scheduler, requests_of(roll()), options(scheduler_options=(option,))))[
        "resources"
    ]
    assert (resources["gpu"]["name"] if scheduler is Scheduler.DSTACK else resources["accelerators"]) == found


def test_keys_of_a_yaml_file_can_be_set():
    text = render(
        Scheduler.SKYPILOT, uniform(), options(scheduler_options=("resources.infra=aws", "resources.use_spot=true"))
    )
    resources = yaml.safe_load(text)["resources"]
    assert (resources["infra"], resources["use_spot"]) == ("aws", True)
    assert text.startswith("# Rendered by")


def test_a_template_of_the_user_has_the_same_values():
    own = "{% for request in requests %}{{ request.label }} {{ request.nodes }} {{ request.cpus }}\n{% endfor %}"
    assert render(Scheduler.SLURM, heterogeneous(), options(), own) == "a800 8 138\n4090 8 34\nfranka 2 3\n"
    with pytest.raises(CannotRender, match="the template fails"):
        render(Scheduler.SLURM, uniform(), options(), "{{ nothing }}")
    assert "roost up" in template_of(Scheduler.SSH)


def test_names_and_values_cannot_break_out_of_a_script(tmp_path):
    odds = ('a\'b; touch nope $(touch nope) "c"', "a b $(touch nope)")
    schedulers = ((Scheduler.SLURM, {}), (Scheduler.SSH, {"hosts": ("a", "b")}))
    for odd, (scheduler, more) in product(odds, schedulers):
        chosen = JobOptions(config=odd, name=odd, workdir=f"/{odd}", runs=odd, env={"X": odd}, **more)
        script = render(scheduler, uniform(), chosen)
        # The job's own words, as a shell takes them apart.
        shown = "srun() { printf '%s\\n' \"$@\"; }; ssh() { printf '%s\\n' \"$@\"; }; scontrol() { :; }; cd() { :; };"
        body = script.replace('"${srun[@]}"', 'srun "${srun[@]:1}"')
        done = subprocess.run(["bash", "-c", shown + body], capture_output=True, text=True, check=False, cwd=tmp_path)
        assert odd in done.stdout.replace("'\"'\"'", "'"), done.stderr
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheduler", list(Scheduler))
def test_a_command_is_a_line_of_shell(scheduler, tmp_path):
    """Whatever starts the nodes, the same text does the same."""
    (tmp_path / "my code").mkdir()
    text = "cd 'my code' && echo \"$PWD\" > found && false || exit 3"
    pods = {"image": "i", "mounts": (f"c:{tmp_path}",)} if scheduler is Scheduler.KUBERAY else {}
    chosen = JobOptions(config="c", name="n", workdir=str(tmp_path), command=text, hosts=("a", "b"), **pods)
    script = render(scheduler, uniform(), chosen)
    if scheduler not in (Scheduler.SLURM, Scheduler.SSH):
        data = yaml.safe_load(script)
        script = data.get("run") or "\n".join(data.get("commands", ())) or data["spec"]["entrypoint"]
    programs = {
        "roost": 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"',
        "srun": 'while [ "$1" != roost ]; do shift; done; exec "$@"',
        "ssh": 'exec bash -c "${!#}"',
    }
    (tmp_path / "bin").mkdir()
    for name, body in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    words = ["bash", "-c", script]
    done = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stdout + done.stderr
    assert (tmp_path / "my code" / "found").read_text() == f"{tmp_path / 'my code'}\n"


def test_nodes_without_a_shared_home_are_given_the_token():
    """Two or more must prove to each other that they belong to the same job."""
    for scheduler in (Scheduler.SKYPILOT, Scheduler.DSTACK):
        assert "RAY_AUTH_TOKEN" in render(scheduler, uniform(), options(env={}))
    assert "RAY_AUTH_TOKEN" not in render(Scheduler.SLURM, uniform(), options(env={}))


@pytest.mark.parametrize(("code", "is_requeued"), [(75, True), (138, True), (1, False), (0, False)])
def test_a_slurm_job_that_fails_after_the_signal_is_not_requeued(tmp_path, code, is_requeued):
    chosen = options(workdir=str(tmp_path), env={})
    signalled = f"preempt() {{ preempted=1; }}; srun() {{ kill -USR1 $$; command sleep 0.2; return {code}; }}"
    stubs = 'scontrol() { echo "$@"; }; sleep() { :; }; SLURM_JOB_ID=7\n'
    script = render(Scheduler.SLURM, uniform(), chosen).replace(
        "trap preempt USR1\n", f"{signalled}\ntrap preempt USR1\n"
    )
    done = subprocess.run(["bash", "-c", stubs + script], capture_output=True, text=True, check=False)
    assert (done.stdout == "requeue 7\n", done.returncode) == (is_requeued, code), done.stderr


def test_apptainer_gives_the_gpus_of_their_vendor():
    allocation = uniform()
    chosen = options(image="i.sif", container=Container.APPTAINER)
    amd = replace(allocation, requests=tuple(replace(one, accelerator_type="AMD_GPU") for one in allocation.requests))
    assert "apptainer exec --nv --pwd" in render(Scheduler.SLURM, allocation, chosen)
    assert "apptainer exec --rocm --pwd" in render(Scheduler.SLURM, amd, chosen)


def test_a_slurm_job_that_is_preempted_during_setup_is_requeued(tmp_path):
    chosen = options(workdir=str(tmp_path), env={}, setup=("kill -USR1 $$",))
    stubs = 'srun() { echo srun; }; scontrol() { echo "$@"; }; sleep() { :; }; SLURM_JOB_ID=7\n'
    words = ["bash", "-c", stubs + render(Scheduler.SLURM, uniform(), chosen)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("requeue 7\n", 75), done.stderr


def test_folders_with_spaces_in_sbatch_lines():
    text = render(Scheduler.SLURM, uniform(), options(workdir="/shared/my team"))
    assert '#SBATCH --output="/shared/my team/%x-%j.out"\n' in text


@pytest.mark.parametrize(
    ("scheduler", "mounts", "runs", "count"),
    [
        (Scheduler.SKYPILOT, ("s3://b:/data",), "/data/runs", 0),
        (Scheduler.SKYPILOT, ("s3://b:/data",), "runs", 1),
        (Scheduler.SKYPILOT, ("./folder:/data",), "/data/runs", 1),  # copied, not mounted
        (Scheduler.DSTACK, ("volume:/data",), "/database", 1),
        (Scheduler.DSTACK, ("volume:/data",), "/data", 0),
        (Scheduler.KUBERAY, ("claim:/shared",), "runs", 0),
        (Scheduler.SLURM, (), "runs", 0),
        (Scheduler.SKYPILOT, (), "s3://bucket/runs", 0),
    ],
)
def test_checkpoints_that_would_be_lost_are_noted(scheduler, mounts, runs, count):
    notes = notes_of(scheduler, options(mounts=mounts, runs=runs, image="some/image", time=None))
    assert [note.partition(" is ")[0] for note in notes] == [f"--runs {runs}"] * count


@pytest.mark.parametrize(
    ("scheduler", "more", "nodes", "fix"),
    [
        (Scheduler.DSTACK, {}, 2, "--mount VOLUME:/shared"),
        (Scheduler.DSTACK, {}, 1, None),
        (Scheduler.DSTACK, {"mounts": ("disk:/data",)}, 2, "--mount VOLUME:/shared"),
        (Scheduler.DSTACK, {"mounts": ("disk:/data",), "scratch": "/data/runs"}, 2, None),
        (Scheduler.SKYPILOT, {"mounts": ("./here:/data",), "scratch": "/data/runs"}, 2, "--option volumes./shared"),
        (Scheduler.SKYPILOT, {"scheduler_options": ("volumes./data=disk",), "scratch": "/data/runs"}, 2, None),
        (Scheduler.KUBERAY, {"mounts": ("claim:/shared",)}, 2, None),
        (Scheduler.KUBERAY, {"mounts": ("claim:/shared",), "scratch": "/tmp/runs"}, 2, "--mount VOLUME:/shared"),
        (Scheduler.SLURM, {}, 2, None),
    ],
)
def test_a_live_run_that_nodes_do_not_share_is_noted(scheduler, more, nodes, fix):
    chosen = options(runs="s3://bucket/runs", image="some/image", time=None, **more)
    notes = notes_of(scheduler, chosen, nodes)
    assert len(notes) == (fix is not None)
    assert all(
        f"all {nodes} nodes must see it: give {fix}" in note and "--scratch /shared/runs" in note for note in notes
    )


@pytest.mark.parametrize("scheduler", [Scheduler.SKYPILOT, Scheduler.DSTACK, Scheduler.SLURM])
def test_the_folder_of_the_live_run_is_in_the_command(scheduler):
    text = render(scheduler, uniform(), options(runs="s3://bucket/runs", scratch="/shared/runs"))
    assert "--runs s3://bucket/runs --scratch /shared/runs --auto-resume" in text
    assert scheduler is not Scheduler.SLURM or "\nrun=/shared/runs/math\n" in text
    with pytest.raises(CannotRender, match="--scratch is for runs at a URL, and --runs is runs"):
        render(scheduler, uniform(), options(scratch="/shared/runs"))


def test_what_a_job_file_does_not_do_is_noted():
    chosen = options(mounts=("s3://b:/data",), runs="/data/runs", image=None, setup=(), time="60")
    missing, unlimited = notes_of(Scheduler.SKYPILOT, chosen)
    assert missing.startswith("new machines have no Roost")
    assert unlimited.startswith("skypilot has no time limit")
    assert notes_of(Scheduler.SSH, chosen) == ["ssh has no time limit for a job: --time 60 is not used"]
    assert notes_of(Scheduler.SLURM, chosen) == []
    assert notes_of(Scheduler.SLURM, options(scheduler_options=("partiton=gpu", "exclusive")))[0].endswith(
        "mean partition?"
    )


WRONG_WORDS = {
    "no number of CPUs": (("--cpus", "agent=nan"), "nan is not a size"),
    "endless CPUs": (("--cpus", "agent=inf"), "inf is not a size"),
    "negative CPUs": (("--cpus", "agent=-1"), "-1 is not a size"),
    "negative memory": (("--memory", "agent=-0.5"), "-0.5 is not a size"),
    "a secret under a wrong name": (("--env", "MY-TOKEN=hidden"), "'MY-TOKEN' cannot be the name of a variable"),
}


@pytest.mark.parametrize("wrong, told", WRONG_WORDS.values(), ids=WRONG_WORDS)
def test_wrong_options_are_refused(wrong, told):
    words = (EXAMPLE / "cluster.yaml", "--inventory", EXAMPLE / "machines.yaml", "--command", "python mine.py")
    refused = run("launch", "slurm", *words, *wrong)
    assert refused.exit_code == 1 and told in refused.output and "hidden" not in refused.output


def test_the_command_prints_writes_and_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = (EXAMPLE / "cluster.yaml", "--inventory", EXAMPLE / "machines.yaml", "--command", "python mine.py")
    printed = run("launch", "slurm", *words)
    assert printed.exit_code == 0 and printed.stdout.count("#SBATCH hetjob") == 2
    written = run("launch", "slurm", *words, "--out", "mine.sbatch")
    assert (tmp_path / "mine.sbatch").read_text() == printed.stdout and "mine.sbatch" in written.output
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = run("launch", "slurm", *words, "--submit")
    assert missing.exit_code == 1
    assert "sbatch is not installed here" in missing.output and "login node" in missing.output
    assert run("launch", "slurm", *words, "--submit", "--name", "Second Run").exit_code == 1
    assert {file.name for file in tmp_path.iterdir()} == {"mine.sbatch", "cluster.sbatch", "second-run.sbatch"}
    wrong = run("launch", "slurm", *words, "--cpus", "agents=2")
    assert wrong.exit_code == 1 and "did you mean agent" in wrong.output.lower()
    folder = tmp_path / "third.sbatch"
    folder.mkdir()
    unwritten = run("launch", "slurm", *words, "--submit", "--name", "third")
    assert unwritten.exit_code == 2 and "third.sbatch cannot be written" in unwritten.output
    assert "for --out" not in unwritten.output, "it was not given"
    no_job = run("launch", "slurm", EXAMPLE / "cluster.yaml")
    assert no_job.exit_code == 1 and "RST-T001" in no_job.output
    no_job = run("launch", "slurm", EXAMPLE / "cluster.yaml", "--inventory", EXAMPLE / "machines.yaml")
    assert no_job.exit_code == 1 and "with --command" in no_job.output
