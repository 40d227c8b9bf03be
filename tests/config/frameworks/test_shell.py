"""The shell reader finds what bash would start; the scripts are run by bash too, and the words compared."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from roost.config.compose import is_script
from roost.config.findings import Findings
from roost.config.shell.script import read_script
from tests.limits import HANG_S

BASH = shutil.which("bash")
SCRIPTS = yaml.safe_load((Path(__file__).parent / "scripts.yaml").read_text())


def read(folder, text, *arguments, **environ):
    file = folder / "run.sh"
    file.write_text(text)
    found = read_script(file, arguments, Findings(), {"HOME": "/home/me", **environ})
    assert found is not None
    return found


def shown(reading):
    words = [[word.known for word in command.words] for command in reading.commands.values()]
    return [command[1:] for command in words if command[0] == "show"]


@pytest.mark.skipif(BASH is None, reason="there is no bash to compare with")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_starts_what_bash_starts(name, tmp_path):
    text = f"#!/bin/bash\n{SCRIPTS[name]}\n"
    reading = read(tmp_path, text, "one", "two words")
    assert not reading.errors
    assert not reading.is_cut
    tool = tmp_path / "show"
    tool.write_text('#!/bin/bash\n{ printf "%s\\0" "$@"; printf "\\1"; } >> "$LOG"\n')
    tool.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/home/me", "LOG": str(tmp_path / "log")}
    command = [BASH, str(tmp_path / "run.sh"), "one", "two words"]
    subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, timeout=HANG_S)
    calls = (tmp_path / "log").read_text().split("\1")[:-1]
    assert shown(reading) == [call.split("\0")[:-1] for call in calls]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("show $(nvidia-smi -L | wc -l)", "output of a command"),
        ("show `hostname`", "output of a command"),
        ("show $NODES", "NODES is not set"),
        ('show "${NODES}"', "NODES is not set"),
        ("N=$(nproc); show $((N * 2))", "output of a command"),
        ("if grep -q x /etc/passwd; then N=1; else N=2; fi; show $N", "condition in line 1"),
        ("[ -f /etc/nothing ] && N=1 || N=2; show $N", "condition in line 1"),
        ("for x in $(ls); do N=$x; done; show $N", "condition in line 1"),
        ("detect() { if command -v nvidia-smi; then N=4; return; fi; N=1; }; detect; show $N", "condition in line 1"),
        ("N=1; f() { [ -f /x ] || return 0; N=2; }; f; show $N", "condition in line 1"),
        ("N=1; for i in 1 2; do if grep -q x y; then N=4; break; fi; done; show $N", "condition in line 1"),
        ("N=1; for i in 1 2; do if grep -q x y; then N=4; continue; fi; done; show $N", "condition in line 1"),
        ("f() { while true; do if a; then N=2; return; fi; N=1; break; done; }; f; show $N", "condition in line 1"),
        ("while true; do if a; then break; fi; N=$((N+1)); done; show $N", "line 1"),
        ("N=2; grep -q H200 /etc/gpus && NNODES=4; show $NNODES", "condition in line 1"),
        ("N=2; nvidia-smi | grep -q H200 || N=4; show $N", "condition in line 1"),
        ("N=2; nvidia-smi && { N=4; }; show $N", "condition in line 1"),
        ("N=$(nproc) || N=8; show $N", "condition in line 1"),
        ("i=0; while (( i < 5000 )); do ((i++)); done; show $i", "rounds of the loop in line 1"),
        ("for ((i = $(nproc); i < 4; i++)); do N=1; done; show $N", "condition in line 1"),
        ("N=1; X=$(nproc); ((N = X + 1)); show $N", "computed from what is not known"),
        ("N=1; ((N += a.b)); show $N", "computed from what is not known"),
        ("printf -v N %05d 3; show $N", "format is not read"),
        ("a=(1 2); ((a[1] += 5)); show ${a[1]}", "index of an element"),
        ("for x in 1 2; do for y in 1 2; do a && N=1 && break 2; N=2; done; done; show $N", "condition in line 1"),
        ("IFS=$(cat x); L=a,b; show $L", "IFS"),
        ("A=(a b); A[$(nproc)]=x; show ${A[0]}", "index of an element"),
        ("declare -A M=([a]=1 [b]=2); if x; then M[b]=3; fi; show ${M[b]}", "condition in line 1"),
        ("set -- $(cat x); while getopts n: opt; do N=$OPTARG; done; show $N", "condition in line 1"),
        (f"X={'c' * 5000}; show ${{X%%*c*d}}", "too long"),
        ("shopt -s extglob; X=foo123; show ${X%%+([0-9])}", "pattern is not known"),
        ("read N; show $N", "read while the script runs"),
        ("while read x; do { read y; show $y; } < file; done <<< a", "read while the script runs"),
        ("while read x; do read y <&3; show $y; done <<< a", "read while the script runs"),
        ("{ if a; then read x; fi; read y; show $y; } <<< $'1\\n2'", "read while the script runs"),
        ("GPUS=(/dev/nvidia[0-9]*); show ${#GPUS[@]}", "which files there are"),
        ("for f in /etc/*.x; do N=1; done; show $N", "condition in line 1"),
        ("false | true; show ${PIPESTATUS[0]}", "only where the script runs"),
        ('show "${FUNCNAME[@]}"', "only where the script runs"),
        ("X=$(cat x); [[ a1 =~ [0-9] ]]; [[ $X =~ ([0-9]+)n ]]; show ${BASH_REMATCH[1]}", "only where the script runs"),
        ("git diff --quiet && N=3; show $N", "condition in line 1"),
        (f"X={'a' * 190}; [[ $X =~ a*a*a*b ]] && N=1; show $N", "condition in line 1"),
        ("show $RANDOM", "only where the script runs"),
        ("N=$(echo hi >&2); show $N", "output of a command"),
        ('declare -A M=([1]=a [2]=b); show "${M[3]}"', "M has no element 3"),
        ('set -- $(true; ls) b; show "$2"', "output of a command"),
        ("f() { ls; echo 2; }; N=$(f); show $N", "output of a command"),
        ("f() { if [ -f /x ]; then echo 1; else echo 2; fi; }; N=$(f); show $N", "output of a command"),
        ("f() { [ -f /x ] && return; echo 2; }; N=$(f); show $N", "output of a command"),
        ("f() { for x in $(ls); do echo 2; done; }; N=$(f); show $N", "output of a command"),
        ("f() { while true; do echo 1; done; }; N=$(f); show $N", "output of a command"),
        ("f() { declare -p X; }; X=1; N=$(f); show $N", "output of a command"),
        ("f() { echo $RANDOM; }; N=x$(f); show $N", "only where the script runs"),
        ("N=$(grep -v x /etc/hostname); show $N", "output of a command"),
        ("N=$(cat missing.txt); show $N", "output of a command"),
        ("N=$(cat run.sh); echo 4 > run.sh; M=$(cat run.sh); show $M", "output of a command"),
        ("sed -i s/a/b/ run.sh; N=$(cat run.sh); show $N", "output of a command"),
        ("f() { echo e >&2; echo o; }; N=$(f 2>&1); show $N", "output of a command"),
        ("f() { echo e >&2; echo o; }; N=$(f |& cat); show $N", "output of a command"),
        ("N=$(if [ -f x ]; then exit 1; fi; echo 8); show $N", "output of a command"),
        ("f() { echo ${Q:?}; echo b; }; N=$(f); show $N", "output of a command"),
        ("f() { exec > log; echo b; }; N=$(f); show $N", "output of a command"),
        ("f() { rm -v x; }; N=$(f); show $N", "output of a command"),
        ("N=$(echo a^ | grep a^); show $N", "output of a command"),
        ("f() { for i in $(seq 1 400); do x=1; y=2; z=3; done; echo 1; }; N=$(f); show $N", "output of a command"),
        ("A=(b); [ -f x ] && A=(a b); A[0]=k; show ${A[1]}", "index of an element"),
        ('X="a b"; [ -f x ] && X="a c"; show ${#X}', "condition in line 1"),
        ("export $(cat missing.env | xargs); show $N", "$(cat missing.env | xargs), which is not known, may give it"),
        ("if [ -f x ]; then M=1; else export $(cat .env); fi; show $N", "$(cat .env), which is not known, may give it"),
        ('f() { show "$3"; }; A=(a $(cat x)); f "${A[@]}" b', "output of a command"),
        ('set -- a $(cat x) b c; show "${@:3}"', "elements are not known"),
        ("X=abcd; show ${X:$(nproc):1}", "bounds are not known"),
        ("X=ab$(cat x); N=${X:1}; [[ $N == ab* ]] && N=1; show $N", "condition in line 1"),
        ('A=(a b c); show "${A[@]:$(nproc)}"', "bounds are not known"),
        ('declare -A M=([a]=1 [b]=2); show "${M[@]:1}"', "elements are not known"),
        ("N=$(readlink /etc/passwd); show $N", "output of a command"),
        ("N=$(realpath --relative-to=/a /a/b); show $N", "output of a command"),
        ("N=$(basename -a a/b); show $N", "output of a command"),
        ("N=$(seq -w 8 10); show $N", "output of a command"),
        ("[[ $HOME == @(/x|/y) ]] && N=1; show $N", "condition in line 1"),
        ("case $HOME in !(/x|/y)) N=1;; esac; show $N", "condition in line 1"),
        ('A_1=x; show "${!A_@}"', "which variables there are"),
        ("A_1=x; for one in ${!A_*}; do N=$one; done; show $N", "condition in line 1"),
        ("N=$(1>log echo hi); show $N", "output of a command"),
        ("N=$(echo a &> /dev/null); show $N", "output of a command"),
        ("N=$(echo a | tr a b >> log); show $N", "output of a command"),
        ("N=$(echo a | cat <<< b); show $N", "output of a command"),
        ("set -- a b; shift $(nproc); show $1", "output of a command"),
        ("mapfile -t L < x; set -- ${L[@]} b; shift; show $1", "read while the script runs"),
        ("set $(nproc) b; show $1", "output of a command"),
        ('set -- $(nproc) b; shift; show "$1"', "output of a command"),
        ("set -e$(nproc) b; show $1", "output of a command"),
        ('A=($(ls)); A=x; show "${A[1]}"', "output of a command"),
        ("N=1; (if a; then exit 3; fi; true) || N=2; show $N", "condition in line 1"),
        ("N=1; (if a; then exec b; fi; exit 0) || N=2; show $N", "condition in line 1"),
        ("N=1; if a; then exec b; fi; N=$RANDOM; show $N", "only where the script runs"),
        ("f() { if a; then return 1; fi; }; f || show $RANDOM", "only where the script runs"),
        ("f() { if a; then return 1; fi; }; N=1; if { f; }; then N=2; fi; show $N", "condition in line 1"),
    ],
)
def test_what_only_a_run_tells_is_unknown_with_a_reason(text, reason, tmp_path):
    command = next(one for one in read(tmp_path, text).commands.values() if one.words[0].known == "show")
    unknown = [word.unknown.reason for word in command.words[1:] if word.unknown is not None]
    if "show $NODES" in text:  # bash leaves out a word of an unset variable alone
        assert len(command.words) == 1
    else:
        assert reason in unknown[0]


def test_the_caller_may_give_what_a_command_would_print(tmp_path):
    text = "NODES=$(scontrol show hostnames | wc -l)\nshow $NODES"
    assert shown(read(tmp_path, text, NODES="4")) == [["4"]]
    unknown = next(iter(read(tmp_path, text).commands.values()))
    assert next(one for one in unknown.words if one.unknown).unknown.variable == "NODES"


@pytest.mark.parametrize("word", ["${ARGS[@]}", '"${ARGS[@]}"', "${BASE}/model"])
def test_a_part_that_is_not_set_leaves_a_word_unknown(word, tmp_path):
    reading = read(tmp_path, f"ARGS=(${{BASE}}/model)\nshow {word}\n")
    (command,) = reading.commands.values()
    assert [one.shown for one in command.words] == ["show", "${BASE}/model"]


@pytest.mark.parametrize(
    ("begin", "branch", "words"),
    [
        ("a b", 'X="$X c"', ["a", "b", None]),
        ("a b", 'X+=" c"', ["a", "b", None]),
        ("a b", 'X="c $X"', [None, "a", "b"]),
        ("a b", 'X="a c b"', ["a", None, "b"]),
        ("a=1 b", "X=a=12", [None]),
        ("a", "X=ab", [None]),
        ("a $(ls)", 'X="$X c"', ["a", None, None]),
    ],
)
def test_words_that_both_branches_have_stay_known(begin, branch, words, tmp_path):
    reading = read(tmp_path, f'X="{begin}"\n[ -f x ] && {branch}\nshow $X end\nbash -c "show $X"')
    assert shown(reading)[0] == [*words, "end"]


@pytest.mark.parametrize(
    ("use", "words"),
    [
        ("show $X-v1", [None]),
        ('show "$X/ckpt"', [None]),
        ("show v$X", [None]),
        ('Y="$X-v1 c"; show $Y', [None, "c"]),
        ('X+="-v1 c"; show $X', [None, "c"]),
        ('Y="c $X d"; show $Y', ["c", "a", None, "d"]),
        ("IFS=:; show $X", [None]),
    ],
)
def test_text_beside_a_part_that_is_not_known_belongs_to_its_words(use, words, tmp_path):
    assert shown(read(tmp_path, f'X="a"; [ -f x ] && X="a b"\n{use}')) == [words]


def test_a_script_goes_on_after_an_output_that_takes_too_many_steps(tmp_path):
    text = "f() { if true; then for i in $(seq 1 490); do x=1; y=2; done; fi; }; N=$(f); show a; exit 1; show b"
    assert shown(read(tmp_path, text)) == [["a"]]


def test_a_word_that_changes_in_every_round_is_unknown(tmp_path):
    reading = read(tmp_path, 'X="a 0"; Y="a 1"; for f in $(ls); do X=$Y; Y="b 2"; done; show $X')
    assert shown(reading) == [[None]]


@pytest.mark.parametrize(("begin", "words"), [("a", "a part of $ARGS"), ("", "$ARGS")])
def test_an_array_says_whether_a_part_of_it_is_known(begin, words, tmp_path):
    text = f'ARGS=({begin})\ncase "$(hostname)" in a*) ARGS+=(b) ;; esac\nshow "${{ARGS[@]}}"\n'
    (command,) = (one for one in read(tmp_path, text).commands.values() if one.words[0].known == "show")
    assert command.words[-1].shown == words


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("sudo NNODES=4 bash inner.sh", "4"),
        ("sudo -E -u me NNODES=4 ./inner.sh", "4"),
        ("srun --export=ALL,NNODES=4 bash inner.sh", "4"),
        ("srun -N 2 --export NNODES=4 bash inner.sh", "4"),
        ("export NNODES=3; srun --export=OTHER=1 bash inner.sh", "1"),
        ("export NNODES=3; srun --export=NONE ./inner.sh", "1"),
        ("sbatch -N 2 --export=ALL,NNODES=4 -J name inner.sh", "4"),
        ("sbatch --parsable inner.sh", "1"),
        ("NNODES=4 sbatch inner.sh", "4"),
        ("docker run -it --rm -e A=1 -e NNODES=4 --gpus all img bash inner.sh", "4"),
        ("docker exec -eNNODES=4 c bash -c 'bash inner.sh'", "4"),
        ("export NNODES=3; docker run img bash inner.sh", "1"),
        ("export NNODES=3; docker run -e NNODES=$NNODES img bash inner.sh", "3"),
        ("apptainer exec --nv --env A=1,NNODES=4 img.sif bash inner.sh", "4"),
        ("mpirun -np 4 -x NNODES=4 ./inner.sh", "4"),
        ("""ray job submit --runtime-env-json='{"env_vars":{"NNODES":"4"}}' -- bash inner.sh""", "4"),
        (
            """N=4; ray job submit --runtime-env-json "{\\"env_vars\\":{\\"NNODES\\":\\"$N\\"}}" -- bash inner.sh""",
            "4",
        ),
        ("""ray job submit --runtime-env-json='{"env_vars":{"NNODES":"'$(nproc)'"}}' -- bash inner.sh""", None),
        ("""ray job submit --runtime-env-json='{"env_vars":{"NNODES":'$(nproc)'}}' -- bash inner.sh""", None),
        ("cluster-run --vars NNODES=4 bash inner.sh", None),
        ("srun --export=ALL,NNODES=$(nproc) bash inner.sh", None),
        ("env NNODES=$(nproc) bash inner.sh", None),
        ("python3 other.py NNODES=4; bash inner.sh", "1"),
    ],
)
def test_a_child_has_the_variables_that_its_command_is_given(text, nodes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inner.sh").write_text("show ${NNODES:-1}\n")
    assert shown(read(tmp_path, text)) == [[nodes]]


ENV_FILES = {
    "job.env": "# NNODES=9\n\n  NNODES=4\nWITH SPACES=1\n",
    "windows.env": "\ufeffNNODES=4\r\nOTHER=1\r\n",
    "quoted.env": "NNODES='4' # nodes\n",
    "bare.env": "NNODES\n",
    "twice.env": "NNODES=4\nNNODES=5\n",
    "job.yaml": 'working_dir: "./"\nenv_vars:\n  NNODES: "4"\n  # TP: "2"\n',
    "number.yaml": "env_vars: {NNODES: 4}\n",
    "list.yaml": "- NNODES\n",
    "empty.yaml": "pip: [x]\n",
}


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("docker run --rm --env-file job.env img bash inner.sh", "4"),
        ("podman run --env-file=job.env img bash inner.sh", "4"),
        ("nerdctl run --env-file $PWD/windows.env img bash inner.sh", "4"),
        ("docker run --env-file quoted.env img bash inner.sh", "'4' # nodes"),
        ("docker run --env-file twice.env img bash inner.sh", "5"),
        ("docker run --env-file twice.env --env-file job.env img bash inner.sh", "4"),
        ("docker run -e NNODES=2 --env-file job.env img bash inner.sh", "2"),
        ("export NNODES=3; docker run --env-file bare.env img bash inner.sh", "3"),
        ("export NNODES=3; docker run -e NNODES img bash inner.sh", "3"),
        ("NNODES=3; docker run -e NNODES --env-file bare.env img bash inner.sh", "1"),
        ("N=4; cat > own.env <<EOF\nNNODES=$N\nEOF\ndocker run --env-file own.env img bash inner.sh", "4"),
        ("cat > own.env <<EOF\nNNODES=$(nproc)\nEOF\ndocker run --env-file own.env img bash inner.sh", None),
        ("docker run --env-file no.env img bash inner.sh", None),
        ("docker run --env-file $(ls *.env) img bash inner.sh", None),
        ("docker run --env-file no.env -e NNODES=2 img bash inner.sh", "2"),
        ("docker run --env-file no.env img env NNODES=2 bash inner.sh", "2"),
        ("docker run --env-file no.env img true; bash inner.sh", "1"),
        ("apptainer exec --env-file job.env img.sif bash inner.sh", "4"),
        ("apptainer exec --env-file quoted.env img.sif bash inner.sh", None),
        ("ray job submit --runtime-env job.yaml -- bash inner.sh", "4"),
        ("ray job submit --address=x --runtime-env=job.yaml --no-wait -- bash inner.sh", "4"),
        ("ray job submit --runtime-env empty.yaml -- bash inner.sh", "1"),
        ("ray job submit --runtime-env number.yaml -- bash inner.sh", None),
        ("ray job submit --runtime-env list.yaml -- bash inner.sh", None),
        ("ray job submit --runtime-env no.yaml -- bash inner.sh", None),
        ("export NNODES=3; ray job submit --runtime-env no.yaml -- bash inner.sh", "3"),
        ("cat > a.yaml <<EOF\nenv_vars:\n  NNODES: '4'\nEOF\nray job submit --runtime-env a.yaml -- ./inner.sh", "4"),
        (
            "cat > a.yaml <<E\nenv_vars: {NNODES: '$(nproc)'}\nE\nray job submit --runtime-env a.yaml -- ./inner.sh",
            None,
        ),
        ("mpirun -genv NNODES 4 -n 2 ./inner.sh", "4"),
        ("mpiexec.hydra -n 2 -ppn 1 -env NNODES=4 bash inner.sh", "4"),
        ("mpiexec -genvall -genv A 1 -env NNODES $(nproc) bash inner.sh", None),
        ("export NNODES=3; mpirun -genvlist A,NNODES -n 2 bash inner.sh", "3"),
        ("export NNODES=3; mpirun -genvlist A,B -n 2 bash inner.sh", "1"),
        ("export NNODES=3; mpirun -genvnone -genv A 1 ./inner.sh", "1"),
        ("mpirun -np 4 --mca btl self,tcp -x NNODES=4 ./inner.sh", "4"),
    ],
)
def test_a_child_has_the_variables_of_a_file_or_of_mpi(text, nodes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in ENV_FILES.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "inner.sh").write_text('show "${NNODES:-1}"\n')
    assert shown(read(tmp_path, text)) == [[nodes]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("N=2; show $N ${N:-1}", ["2", "2"]),
        ("show ${NNODES:+--nodes}", [None]),
        ('show ${NNODES:+"--nodes"}', [None]),
        ("N+=1; show $HOME $N ${A[@]} $#", ["/home/me", None, "0"]),
        ("if [ -z $NNODES ]; then N=1; else N=2; fi; show $N", [None]),
        ("N=1; [[ -v NNODES ]] && N=2; show $N", [None]),
        ("show $((NNODES + 1))", [None]),
        ("set -- -n 4; while getopts n: one; do N=$OPTARG; done; show $N", ["4"]),
        ("bash -c 'show $NNODES'", [None]),
        ("docker run img bash -c 'show ${NNODES:-1}'", ["1"]),
        ("A=1; A+=2; B=(x); B+=(y); show $A ${B[@]}", ["12", "x", "y"]),
    ],
)
def test_a_file_that_is_not_here_may_give_any_variable(text, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inner.sh").write_text(f"set -u\n{text}\n")
    reading = read(tmp_path, "docker run --env-file no.env img bash inner.sh")
    assert shown(reading) == [words]
    assert reading.stops == []
    unknown = [word.unknown for command in reading.commands.values() for word in command.words if word.unknown]
    assert all("no.env, which is not here" in one.reason or "condition" in one.reason for one in unknown)


@pytest.mark.parametrize(
    "text",
    [
        "jobid=$(sbatch inner.sh)",
        "jobid=$(NNODES=1 sbatch --parsable -N 2 inner.sh | cut -d';' -f1)",
        "jobid=`sbatch inner.sh`",
        "export JOB=$(sbatch --export=ALL,A=1 inner.sh 2>&1 | awk '{print $4}')",
        'echo "submitted $(sbatch inner.sh)" | tee log',
        "jobid=$(cd . && sbatch inner.sh)",
        'JOBS+=("$(sbatch inner.sh || exit 1)")',
        "if ! jobid=$(sudo sbatch inner.sh); then exit 1; fi",
        "jobid=$(sbatch <<EOT\n#!/bin/bash\nbash inner.sh\nEOT\n)",
        "jobid=$(echo 'bash inner.sh' | sbatch)",
        "jobid=$(ray job submit --no-wait -- bash inner.sh)",
        "submit() { local id; id=$(sbatch $1); echo $id; }; submit inner.sh",
    ],
)
def test_a_job_that_a_substitution_submits_is_read_once(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inner.sh").write_text("#!/bin/bash\nshow ${NNODES:-1}\n")
    reading = read(tmp_path, f"{text}\nshow $jobid\n")
    assert shown(reading) == [["1"], [None]] if "jobid" in text else [["1"], []]
    assert not reading.errors


@pytest.mark.parametrize(
    "text",
    [
        "N=$(bash inner.sh)",
        "N=$(python3 x.py)",
        "N=$(which sbatch)",
        "N=$(squeue | grep sbatch)",
        "N=$(srun bash inner.sh)",
        "N=${X:-$(sbatch inner.sh)}",
    ],
)
def test_a_substitution_that_submits_nothing_starts_nothing(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inner.sh").write_text("#!/bin/bash\nshow 1\n")
    assert not read(tmp_path, text, X="2").commands


@pytest.mark.parametrize(
    "text",
    [
        "sbatch $0",
        "export A=1; NEXT=$(sbatch --dependency=afterany:$SLURM_JOB_ID run.sh)",
        'echo "next: $(sbatch $PWD/run.sh)" | tee log',
        "./other.sh",
    ],
)
def test_a_job_that_submits_itself_again_is_read_once(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.sh").write_text("sbatch run.sh\n")
    reading = read(tmp_path, f"{text}\nshow 1\n")
    assert {"1"} == {word for words in shown(reading) for word in words}
    assert not reading.is_cut


def test_a_script_that_starts_itself_with_other_arguments_is_read_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shown(read(tmp_path, "if [ -z $1 ]; then bash run.sh worker; else show $1; fi")) == [["worker"]]


def test_a_submitted_job_is_read_for_each_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inner.sh").write_text("#!/bin/bash\nshow $NNODES\n")
    text = "for n in 1 2; do export NNODES=$n; jobs+=($(sbatch --parsable inner.sh)); done"
    assert shown(read(tmp_path, text)) == [["1"], ["2"]]


def test_a_program_that_is_no_shell_script_is_not_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tool").write_text("#!/usr/bin/env python3\nshow no\n")
    (tmp_path / "job").write_text("#!/usr/bin/env bash\nshow yes\n")
    assert shown(read(tmp_path, "./tool; sbatch tool; ./job")) == [["yes"]]


def test_a_backslash_at_the_end_of_a_script_is_no_word(tmp_path):
    assert shown(read(tmp_path, "show a \\")) == [["a"]]


def test_a_command_that_prepares_something_is_taken_to_succeed(tmp_path):
    assert shown(read(tmp_path, "mkdir -p x && N=1; pip install y || N=2; pgrep -f x && exit 0; show $N")) == [["1"]]


def test_functions_that_nest_too_deep_stop_the_reading(tmp_path):
    text = "".join(f"f{at}() {{ f{at + 1}; }}; " for at in range(20))
    reading = read(tmp_path, f"{text}f20() {{ N=3; }}; N=1; f0; show $N")
    assert reading.is_cut
    assert shown(reading) == []


@pytest.mark.parametrize("word", ['"$(cat x)"', "$((RANDOM + 1))", "$RANDOM", "$#"])
def test_an_unknown_word_that_is_one_leaves_those_after_it(word, tmp_path):
    assert shown(read(tmp_path, f"f() {{ show $2; }}; f {word} b")) == [["b"]]


@pytest.mark.parametrize("word", ["${X:1}", "${X#a}", "${X^^}", "${X/b/c}"])
def test_a_changed_text_that_is_known_in_part_is_unknown(word, tmp_path):
    (command,) = (one for one in read(tmp_path, f"X=ab$(cat x); show {word}").commands.values())
    assert [one.shown for one in command.words[1:]] == [word]


def test_texts_that_are_parsed_count_by_their_length(tmp_path):
    assert read(tmp_path, f"X={'c' * 40_000}; for i in {{1..100}}; do eval ': $X'; eval \": $X\"; done").is_cut


def test_each_command_has_the_variables_of_its_moment(tmp_path):
    many = " ".join(f"X{at}={at}" for at in range(40))
    text = f"{many}; A=1; B=2; show 1; A=3; show 2; unset B; C=4; show 3; unset {many.replace('=', ' ')}; B=2; show 4"
    commands = list(read(tmp_path, text).commands.values())
    found = [{name: one.variables[name].known for name in one.variables if name in "ABC"} for one in commands]
    assert found == [{"A": "1", "B": "2"}, {"A": "3", "B": "2"}, {"A": "3", "C": "4"}, {"A": "3", "B": "2", "C": "4"}]
    numbers = [len([name for name in one.variables if name.startswith("X")]) for one in commands]
    assert numbers == [40, 40, 40, 0]
    assert all(len(one.variables) == len(list(one.variables)) for one in commands)


def test_keys_that_a_branch_leaves_alone_are_known(tmp_path):
    text = "declare -A M=([a]=1 [b]=2); if x; then M[b]=3; fi; show ${M[a]}"
    assert shown(read(tmp_path, text)) == [["1"]]


def test_options_of_the_caller_are_followed(tmp_path):
    text = 'while getopts "n:" opt; do case $opt in n) N=$OPTARG;; esac; done; show $N'
    reading = read(tmp_path, text, "-n", "4")
    assert shown(reading) == [["4"]]
    assert reading.reads_arguments


def test_branches_that_agree_are_known(tmp_path):
    text = "if grep -q x y; then A=1; B=2; else A=1; B=3; fi; show $A"
    assert shown(read(tmp_path, text)) == [["1"]]


def test_words_have_their_places(tmp_path):
    reading = read(tmp_path, 'ARGS=(\n  --a 1\n  # no\n  --b "$X"\n)\nshow "${ARGS[@]}" last\n', X="2")
    (command,) = reading.commands.values()
    places = [(word.known, *word.position[1:]) for word in command.words[1:]]
    assert places == [("--a", 2, 3), ("1", 2, 7), ("--b", 4, 3), ("2", 4, 7), ("last", 6, 19)]


def test_words_of_texts_have_their_places(tmp_path):
    """Of `bash -c`, `eval`, here-documents and split variables, behind joined lines, backslashes and expansions."""
    text = r"""
X="--a 1
  --b $N"
srun bash -c "cd /w \
 && show \"p\" \
  $X q 'r'
 show $(nproc) s"
bash <<-EOF
TABTAB show \$X t
EOF
eval 'show u;
 show v' w
Y=$'show x;\n show y
 show z'; bash -c "$Y"
"""
    reading = read(tmp_path, text.replace("TAB", "\t"), N="2")
    assert not reading.errors
    commands = [command for command in reading.commands.values() if command.words[0].known == "show"]
    places = [[(word.shown, *word.position[1:]) for word in command.words[1:]] for command in commands]
    assert places == [
        [("p", 5, 11), ("--a", 2, 4), ("1", 2, 8)],
        [("$(nproc)", 7, 7), ("s", 7, 16)],
        [("t", 9, 13)],
        [("u", 11, 12)],
        [("v", 12, 7), ("w", 12, 10)],
        [("x", 13, 10)],
        [("y", 13, 20)],
        [("z", 14, 7)],
    ]


def test_words_behind_values_without_places_have_their_own(tmp_path):
    """Of the environment, of echo and printf; words within such a value have the place of the value."""
    text = """echo "show a  b" c | bash
eval show "$E" d $E e
X="$E"; bash -c "show $X f"
printf 'show g %s\\n' h | bash
"""
    reading = read(tmp_path, text, E="u v")
    commands = [command for command in reading.commands.values() if command.words[0].known == "show"]
    places = [[(word.known, *word.position[1:]) for word in command.words[1:]] for command in commands]
    assert places == [
        [("a", 1, 12), ("b", 1, 15), ("c", 1, 18)],
        [("u", 2, 11), ("v", 2, 11), ("d", 2, 16), ("u", 2, 18), ("v", 2, 18), ("e", 2, 21)],
        [("u", 3, 3), ("v", 3, 3), ("f", 3, 26)],
        [("g", 4, 1), ("h", 4, 1)],
    ]


def test_sourced_files_are_read_where_they_are(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a.sh").write_text("ARGS=(--layers 4)\n")
    text = 'source "$(dirname "$0")/models/a.sh"\nsource "$(dirname "$0")/models/b.sh"\nshow "${ARGS[@]}"\n'
    reading = read(tmp_path, text)
    assert shown(reading) == [["--layers", "4"]]
    assert [path.rpartition("/")[2] for path, _ in reading.missing_sources] == ["b.sh"]


def test_files_that_source_each_other_are_named(tmp_path):
    (tmp_path / "a.sh").write_text(f"source {tmp_path}/b.sh\n")
    (tmp_path / "b.sh").write_text(f"N=2; source {tmp_path}/a.sh\n")
    reading = read(tmp_path, f"source {tmp_path}/a.sh; show $N")
    assert ([why for _, _, why in reading.not_followed], reading.missing_sources) == (["sources itself"], [])
    assert shown(reading) == [["2"]]


@pytest.mark.parametrize(
    "text",
    ["if true; then", "show 'a", 'show "a', "A=(1 2", "show $(a", "case x in", "{ a", "show ${A", "fi", "a )", "for"],
)
def test_what_cannot_be_parsed_is_said_with_its_place(text, tmp_path):
    reading = read(tmp_path, f"show first\n{text}\n")
    assert shown(reading)[:1] == [["first"]]
    assert reading.errors[0].position[1] >= 2


@pytest.mark.parametrize(
    "text",
    [
        "f() { f; }; f",
        "while true; do :; done",
        "x=a; for i in {1..200}; do x=$x$x; done; show $x",
        'A=(1); for i in {1..200}; do A+=("${A[@]}"); done',
        "show {1..20}{1..20}{1..20}{1..20}",
        "$(" * 500,
        "(" * 500,
        "if a; then " * 200,
        "show " + "${A:-" * 200 + "}" * 200,
        "bash run.sh",
        "source run.sh",
        "x=" + "(" * 300 + ")" * 300 + "; show $((x))",
        "show $((9**99999999))",
        "show $((" + "-" * 3000 + "1))",
        "X=" + "c" * 90_000 + "; show ${X%%*c*d}",
        "x=$((1+1))\n" * 5_000,
        "A+=(x)\n" * 15_000,
        "X+=aaaa\n" * 20_000,
        "".join(f"A[{at}]=1\n" for at in range(9_000)),
        f"X={'a' * 190}\nfor i in {{1..200}}; do [[ $X =~ a*a*a*b ]]; done",
        "".join(f"if a; then V{at}=1; fi\n" for at in range(1_500)),
        "show " + "{" * 9_000 + "," + "}" * 9_000,
        "show " + "{,}" * 200,
        "show {1..999999999999999}",
        "for i in {450..1}; do for j in {60..1}; do A[i*60+j]=x; done; done",
        "A=({1..4999} {1..4999} {1..4999}); for i in {1..400}; do for j in {1..60}; do unset A[i*30+j]; done; done",
        "".join(f"V{at}=1\n" for at in range(12_000)) + "".join(f"a {at}\n" for at in range(2_000)),
        "A[x;" * 5_000,
    ],
    ids=range(28),
)
def test_reading_ends(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    read(tmp_path, text)


@pytest.mark.filterwarnings("error")
def test_an_odd_expression_is_unknown_without_a_warning(tmp_path):
    assert shown(read(tmp_path, "show $((1or 2)) x")) == [[None, "x"]]


@pytest.mark.parametrize(
    ("name", "first", "is_one"),
    [
        ("run", "#!/bin/bash -x", True),
        ("run", "#!/usr/bin/env bash", True),
        ("run", "#!/usr/bin/python3", False),
        ("run.slurm", "#SBATCH -N 2", True),
        ("run.sbatch", "", True),
        ("run.job", "", True),
        ("run.yaml", "#!/bin/bash", False),
    ],
)
def test_scripts_are_known_by_name_or_first_line(name, first, is_one, tmp_path):
    (tmp_path / name).write_text(f"{first}\nx\n")
    assert is_script(tmp_path / name) == is_one


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("set -u; show $RAY_DATA_HOME/x", ["RAY_DATA_HOME"]),
        ("set -euo pipefail\nF=$RAY_DATA_HOME/x; show $F $F", ["RAY_DATA_HOME"]),
        ("set -o nounset; A=($MISSING); show $MISSING $OTHER", ["MISSING", "OTHER"]),
        ("show $MISSING", []),
        ("set -u; show ${MISSING:-1} ${MISSING+x} $HOME $SLURM_JOB_ID ${A[@]}", []),
        ("set -u; show ${1:-x} $@ $# $2", ["$2"]),
        ("set -u; set -- $(cat x); show $2", []),
        ("show $X ${GIVEN:?is needed} ${1:?too} ${HOME:?}", ["GIVEN", "$1"]),
        ("N=${NODES?}; source no_such_file.sh; show ${LATER?}", ["NODES"]),
        ("set -u; set -- a; show $1; f() { show $1; }; f", ["$1"]),
        ('if [ -z "$MODEL" ]; then exit 2; fi', ["MODEL"]),
        ('MODEL=$1; SIZE=$2; if [ -z "$MODEL" ] || [ -z "$SIZE" ]; then exit 2; fi', ["$1", "$2"]),
        ("set -u; set +u; show $MISSING", []),
        ("set -u; if grep -q x y; then show $MISSING; fi", []),
        ("set -u; source no_such_file.sh; show $MISSING", []),
        ('SIZE=$3; if [ -z "$SIZE" ]; then exit 1; fi', ["$3"]),
        ('if [ "$#" -lt 2 ]; then exit 1; fi', ["$1"]),
        ("[[ -n $2 ]] || { exit 2; }", ["$2"]),
        ('SIZE=$SPAN; if [ -z "$SIZE" ]; then exit 1; fi', ["SIZE"]),
    ],
)
def test_a_script_with_set_u_stops_at_what_is_not_set(text, names, tmp_path):
    assert [name for _, stopped in read(tmp_path, text).stops for name in stopped] == names


@pytest.mark.parametrize(
    ("text", "stops", "ends"),
    [
        ("exit 0", 0, True),
        ("if true; then exit $?; fi; show no", 0, True),
        ("if true; then exit 2; fi; show yes", 1, False),
        ("(exit 0); show yes", 0, False),
        ("if true; then (exit 2); fi; show yes", 0, False),
        ("exit 0 | cat; exit 1 & show yes", 0, False),
        ("bash -c 'if true; then exit 2; fi; exit'; show yes", 0, False),
    ],
)
def test_only_an_exit_of_the_script_itself_ends_it(text, stops, ends, tmp_path):
    reading = read(tmp_path, text)
    assert (len(reading.stops), reading.ended is not None) == (stops, ends)
    assert shown(reading) == ([["yes"]] if "yes" in text else [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('N=1; for f in /etc/host*; do show "$N" x; N=$((N*2)); done', [["1", "x"], [None, "x"]]),
        ('for ((i = 0; i < $(nproc); i++)); do show "$i"; done; show "$i" end', [["0"], [None], [None, "end"]]),
        ('N=1; while a; do show "$N"; N=2; done', [["1"], [None]]),
        ('N=1; while a; do N=2; show "$N"; done', [["2"]]),
        ('LAST=; for f in *.x; do show "$LAST"; LAST=$f; [ -f x ] && break; done', [[""], [None]]),
    ],
)
def test_later_rounds_of_a_loop_have_what_the_first_changes(text, words, tmp_path):
    assert shown(read(tmp_path, text)) == words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("if a; then f() { show 1; N=1; }; else f() { show 2; N=2; }; fi; f; show $N", [["1"], ["2"], [None]]),
        ("if a; then show() { command show own; }; fi; show 1", [["own"], ["1"]]),
        ("f() { show 0; }; for x in $(ls); do f() { show 1; }; done; f && show 2", [["1"], ["0"], ["2"]]),
        ("if a; then f() { return 1; }; else f() { return 0; }; fi; N=1; f && N=2; show $N", [[None]]),
    ],
)
def test_functions_that_an_unknown_condition_defines_are_all_read(text, words, tmp_path):
    assert shown(read(tmp_path, text)) == words


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("cat >> f.sh <<< 'show 2'", [["1"], ["2"]]),
        ("(cat > f.sh <<< 'show 3')", [["3"]]),
        ("echo show 2 > f.sh", []),
        ("{ echo show 2; } > f.sh", []),
        ("sed -i s/1/2/ f.sh", []),
        ("mv other.sh ./f.sh", []),
        ("if a; then cat > f.sh <<< 'show 2'; fi", []),
        ("sed s/1/2/ f.sh > g.sh", [["1"]]),
        ("rm -rf ../*; rm -r .", []),
        ("cat f.sh | tee -a f.sh", []),
    ],
)
def test_a_written_script_is_known_until_a_command_changes_it(change, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reading = read(tmp_path, f"cat > f.sh <<'EOF'\nshow 1\nEOF\n{change}\nbash f.sh")
    assert (shown(reading), reading.missing_scripts) == (words, [])


BATCH = "#!/bin/bash\n#SBATCH --nodes=3 --ntasks-per-node 2 # of them\n#SBATCH -c16 --gres=gpu:h100:4\n"
SHOWN = "show $SLURM_NNODES $SLURM_JOB_NUM_NODES $SLURM_NTASKS $SLURM_CPUS_PER_TASK $SLURM_GPUS_ON_NODE"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BATCH + SHOWN, ["3", "3", "6", "16", "4"]),
        (f"{BATCH}X=1\n#SBATCH --nodes=9\n{SHOWN}", ["3", "3", "6", "16", "4"]),
        ("#SBATCH -N 2-4\nshow ${SLURM_NNODES:-none}", ["none"]),
        ("#SBATCH --gpus-per-node=a100:2\nshow $SLURM_GPUS_PER_NODE $SLURM_GPUS_ON_NODE", ["a100:2", "2"]),
        ('#SBATCH --nodes="3\nshow ${SLURM_NNODES:-none}', ["none"]),
        (f"sbatch -N 5 --ntasks-per-node=1 <<'EOF'\n{BATCH}{SHOWN}\nEOF", ["5", "5", "5", "16", "4"]),
        (f"cat > job.sh <<'EOF'\n{BATCH}{SHOWN}\nEOF\nsbatch --gres gpu:2 job.sh", ["3", "3", "6", "16", "2"]),
        (f"sbatch --nodes=$COUNT <<'EOF'\n{BATCH}show ${{SLURM_NNODES:-none}}\nEOF", ["none"]),
        ("sbatch --wrap 'show ${SLURM_NNODES:-none}' -N 2", ["2"]),
        (f"bash <<'EOF'\n{BATCH}show ${{SLURM_NNODES:-none}}\nEOF", ["none"]),
    ],
)
def test_variables_of_slurm_follow_from_the_lines_of_a_batch_script(text, words, tmp_path):
    assert shown(read(tmp_path, text)) == [words]


def test_variables_of_slurm_that_the_caller_gives(tmp_path):
    assert shown(read(tmp_path, f"{BATCH}show $SLURM_NNODES", SLURM_NNODES="8")) == [["8"]]


def test_a_batch_script_knows_the_folder_it_is_submitted_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shown(read(tmp_path, "#SBATCH -N 2\nshow $SLURM_SUBMIT_DIR/x")) == [[f"{tmp_path}/x"]]


@pytest.mark.parametrize(
    ("text", "absent"),
    [
        ("bash later.sh", ["later.sh"]),
        ("cd run && exec bash ./later.sh", ["./later.sh"]),
        ("sbatch jobs/later.slurm", ["jobs/later.slurm"]),
        ("./build/later --x", []),
        ("cat > now.sh <<'EOF'\nshow 1\nEOF\nbash now.sh", []),
        ("source later.sh", []),
    ],
)
def test_scripts_that_are_started_and_are_not_here(text, absent, tmp_path):
    assert [path for path, _ in read(tmp_path, text).missing_scripts] == absent


@pytest.mark.parametrize(("path", "is_named"), [("env.sh", True), (".venv/bin/activate", False)])
def test_what_a_virtual_environment_sets_is_not_missed(path, is_named, tmp_path):
    assert bool(read(tmp_path, f"source {path}").missing_sources) == is_named


def test_windows_line_endings_are_named_by_their_first_line(tmp_path):
    file, findings = tmp_path / "run.sh", Findings()
    file.write_bytes(b"N=2\nshow $N\r\nshow 3\r\n")
    reading = read_script(file, (), findings, {})
    assert [(one.code, one.where.line) for one in findings.warnings] == [("RST-C053", 2)]
    assert shown(reading) == [["2"], ["3"]]
