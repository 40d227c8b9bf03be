"""Whatever a script holds, planning it gives a plan or findings, and runs nothing."""

import random

import pytest

import roost
from roost.config.findings import ConfigError

SEEDS = (
    """#!/bin/bash
set -xeuo pipefail
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' && echo npu || echo gpu)}
NNODES=${NNODES:-2}
max_len=$((1024 * 2))
TRAINER=(
    trainer.nnodes=${NNODES}  # nodes
    trainer.n_gpus_per_node=8
    trainer.logger='["console"]'
)
case "${DEVICE}" in
    gpu) ;;
    *) TRAINER+=(trainer.n_gpus_per_node=16) ;;
esac
if [ "$NNODES" -gt 1 ] && [[ -n "${X:-y}" ]]; then export TP=4; else TP=2; fi
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.max_prompt_length=${max_len} \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=$TP "${TRAINER[@]}" "$@" 2>&1 | tee run.log
""",
    """#!/bin/bash
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/none.sh"
for n in 1 2; do NODES=$n; done
while [ $# -gt 0 ]; do shift; done
start() { local gpus=$1; ray start --head --num-gpus "$gpus"; }
start 8
JSON="{\\"env_vars\\": {\\"A\\": \\"${A:-1}\\"}}"
cat <<EOF > settings.txt
NODES=$NODES
EOF
ray job submit --runtime-env-json="${JSON}" -- python3 train.py --actor-num-nodes $NODES \\
   --actor-num-gpus-per-node 8 --colocate --rollout-num-gpus-per-engine 4 ${MODEL_ARGS[@]}
""",
    """#!/bin/bash
GPUS=$(nvidia-smi -L | wc -l)
read -r -d '' TRAIN <<EOF
openrlhf.cli.train_ppo_ray --actor.num_nodes 1 --actor.num_gpus_per_node 4 --ref.num_gpus_per_node 4
EOF
ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --actor.num_nodes ${NODES:-2} --ref.num_nodes 2 \\
   --vllm.num_engines $((GPUS / 2)) --vllm.tensor_parallel_size 2 --train.colocate_all --algo.kl.init_coef 1e-3 \\
   --reward.remote_url "$URL" --vllm.enable_sleep --critic.num_gpus_per_node 8
""",
    """#!/bin/bash
: "${NUM_GPUS:=4}"
uv run --isolated --extra fsdp -m skyrl.train.entrypoints.main_base data.train_data="['$HOME/train.parquet']" \\
  trainer.placement.policy_num_gpus_per_node=$NUM_GPUS trainer.placement.ref_num_gpus_per_node=$NUM_GPUS \\
  generator.inference_engine.num_engines=$((NUM_GPUS / 2)) generator.inference_engine.tensor_parallel_size=2 \\
  trainer.algorithm.use_kl_loss=$(cat kl) trainer.placement.colocate_all=false $@
""",
    """#!/bin/bash
CUDA_VISIBLE_DEVICES=0,1 trl vllm-serve --model Qwen/Qwen2.5-7B --tensor-parallel-size 2 &
srun bash -c "CUDA_VISIBLE_DEVICES=2,3,$X accelerate launch --config_file zero3.yaml --num_processes ${N:-2} \\
  train_grpo.py --use_vllm --vllm_mode server --beta $(cat beta)"
""",
    """#!/bin/bash
cat > job.env <<EOF
# of the container
NNODES=$N
TP
EOF
cat > inner.sh <<'EOF'
[ -v TP ] || export TP=${TP:-2}
mpirun -genv A 1 -n 1 python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.nnodes=${NNODES:-1} \\
    ${EXTRA:+"$EXTRA"} actor_rollout_ref.rollout.tensor_model_parallel_size=$TP
EOF
jobid=$(sbatch --parsable --wrap "docker run --env-file job.env --env-file no.env img bash inner.sh" | cut -d';' -f1)
next=$(sbatch --dependency=afterok:$jobid "$0")
ray job submit --runtime-env no.yaml -- bash inner.sh
""",
)
# Each would leave a file if it were executed.
HARM = (
    "$(touch harm)",
    "`touch harm`",
    '"$(touch harm)"',
    "eval 'touch harm'",
    "trap 'touch harm' EXIT",
    "> harm",
    "exec > harm",
    "<(touch harm)",
    "${X:=$(touch harm)}",
    "$((a[$(touch harm)]))",
    "bash -c 'touch harm'",
    "source <(echo touch harm)",
    "coproc touch harm",
    "cat <<EOF > harm\n$(touch harm)\nEOF",
    "printf -v x %s `touch harm`",
    "alias ls='touch harm'; ls",
    "x=$(sbatch --wrap 'touch harm')",
)
PIECES = (
    *HARM,
    "'",
    '"',
    "(",
    ")",
    "{",
    "}",
    "${",
    "$((",
    "))",
    "[[",
    "]]",
    ";;",
    "\\\n",
    "\n",
    "#",
    "&&",
    "|",
    "done",
)


def mutated(chance):
    text = chance.choice(SEEDS)
    for _ in range(chance.randint(1, 6)):
        at, kind = chance.randrange(len(text) + 1), chance.randrange(4)
        if kind == 0:
            text = text[:at] + text[at + chance.randint(1, 20) :]
        elif kind == 1:
            text = text[:at] + chance.choice(PIECES) + text[at:]
        elif kind == 2:
            text = f"{text[:at]}\n{chance.choice(HARM)}\n{text[at:]}"
        else:
            end = at + chance.randint(1, 60)
            text = text[:end] + text[at:end] + text[end:]
    return text


def check(count, seed, folder):
    chance = random.Random(seed)
    planned = 0
    for _ in range(count):
        (folder / "run.sh").write_text(mutated(chance))
        try:
            roost.plan(folder / "run.sh")
            planned += 1
        except ConfigError as error:
            assert error.findings
        assert [file.name for file in folder.iterdir()] == ["run.sh"]
    assert 0 < planned < count


def test_mutated_scripts_give_findings_and_run_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(200, 1, tmp_path)


@pytest.mark.long
def test_two_thousand_mutated_scripts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(2000, 2, tmp_path)


@pytest.mark.parametrize("harm", HARM)
def test_a_harmful_line_is_only_read(harm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = SEEDS[0].splitlines(keepends=True)
    (tmp_path / "run.sh").write_text("".join([*lines[:2], harm, "\n", *lines[2:]]))
    try:
        roost.plan(tmp_path / "run.sh")
    except ConfigError as error:
        assert error.findings
    assert [file.name for file in tmp_path.iterdir()] == ["run.sh"]
