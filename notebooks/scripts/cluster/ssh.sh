#!/bin/bash
# Any hosts you may ssh to:   FOLDER=/shared/run bash ssh.sh host0 host1
# The course is in the same place on all of them (COURSE), and FOLDER is on storage that
# they share. A host may be user@host. When one fails, the others are stopped; run it
# again to go on from the newest checkpoint. Two jobs on one host need two PORTs.
# To see the commands only:   SSH=echo FOLDER=… bash ssh.sh host0 host1

set -euo pipefail

if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
    echo "needs bash 4.4 or newer, this is $BASH_VERSION" >&2
    exit 2
fi
: "${FOLDER:?set it to a folder that all hosts share}" "${1:?name the hosts}"
SSH=${SSH:-ssh -tt -o BatchMode=yes} # -tt: what runs there ends with the connection
COURSE=${COURSE:-$PWD}
TORCHRUN=${TORCHRUN:-.venv/bin/torchrun}
PORT=${PORT:-29500}
JOB=${JOB:-$(id -un)-$$} # so that another job never meets this one

running=()
stop() {
    kill "${running[@]}" 2>/dev/null || true
    wait
}
trap stop EXIT
trap 'exit 130' INT TERM HUP

is_host=1 # of the rendezvous: the first
for host in "$@"; do
    words=(
        env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 OMP_NUM_THREADS=1
        "$TORCHRUN" "--nnodes=$#" --nproc-per-node=gpu --max-restarts=3
        --rdzv-backend=c10d "--rdzv-endpoint=${1#*@}:$PORT" "--rdzv-id=$JOB"
        "--rdzv-conf=is_host=$is_host" "--local-addr=${host#*@}"
        notebooks/scripts/train_on_nodes.py "--folder=$FOLDER" --steps=40
    )
    # shellcheck disable=SC2086 # SSH may be several words
    $SSH "$host" "cd $(printf %q "$COURSE") && exec $(printf '%q ' "${words[@]}")" \
        </dev/null &
    running+=($!)
    is_host=0
done

# Not `wait -n`: a signal that comes just before it would have to wait, too.
while ((${#running[@]} > 0)); do
    sleep 0.5
    for i in "${!running[@]}"; do
        kill -0 "${running[i]}" 2>/dev/null && continue
        wait "${running[i]}" # if it failed: ends the script, and so all others
        unset "running[i]"
    done
done
