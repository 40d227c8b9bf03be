#!/bin/bash
# Rendered by `roost launch ssh job.yaml`: starts `roost up` on 2 hosts, in rank order.
# nodes 0-1: 8 accelerators, 38 CPUs, 1115 GB
set -uo pipefail
hosts=(
  ann@alpha
  beta
)
head=${hosts[0]#*@}
job=$(date +%s)-$$ # jobs with the same head are told apart by it

started=()
trap 'kill "${started[@]}" 2>/dev/null' EXIT # a closed terminal ends the remote command
trap 'exit 130' INT
trap 'exit 143' TERM
for rank in "${!hosts[@]}"; do
  # -tt: the remote command gets SIGHUP when this script ends.
  ssh -tt -o SendEnv=HF_TOKEN "${hosts[$rank]}" "cd /shared/team && {
    ulimit -n 65535 2>/dev/null || ulimit -n \$(ulimit -Hn)
    export NODE_RANK=$rank NNODES=2 MASTER_ADDR=$head ROOST_JOB_ID=$job
    export HF_HOME='/shared/hf home'
    echo \"\$HOME\"
    exec roost up --nodes 2 -- roost train job.yaml --name math --runs runs --auto-resume
  }" </dev/null > >(sed -u "s/^/[$rank ${hosts[$rank]}] /") 2>&1 &
  started+=($!)
done
wait "${started[0]}"
exit $?
