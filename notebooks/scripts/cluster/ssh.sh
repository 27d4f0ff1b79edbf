#!/bin/bash
# Any hosts you may ssh to:   FOLDER=/shared/digits bash ssh.sh host0 host1
# The course is in the same place on all of them (COURSE), and FOLDER is on storage that
# they share. When one host fails, the others are stopped; run it again to go on from the
# newest checkpoint. To see the commands only:   SSH=echo FOLDER=… bash ssh.sh host0 host1

set -euo pipefail

: "${FOLDER:?set it to a folder that all hosts share}" "${1:?name the hosts}"
SSH=${SSH:-ssh -tt -o BatchMode=yes} # -tt: what runs there ends with the connection
COURSE=${COURSE:-$PWD}
TORCHRUN=${TORCHRUN:-.venv/bin/torchrun}
RANKS=${RANKS:-1}
PORT=${PORT:-29500}

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
        "$TORCHRUN" "--nnodes=$#" "--nproc-per-node=$RANKS" --max-restarts=3
        --rdzv-backend=c10d "--rdzv-endpoint=$1:$PORT" --rdzv-id=digits
        "--rdzv-conf=is_host=$is_host" "--local-addr=$host"
        notebooks/scripts/train_elastic.py "--folder=$FOLDER" --steps=40
    )
    # shellcheck disable=SC2086 # SSH may be several words
    $SSH "$host" "cd $(printf %q "$COURSE") && exec $(printf '%q ' "${words[@]}")" \
        </dev/null &
    running+=($!)
    is_host=0
done

for _ in "$@"; do
    wait -n # ends the script, and so all others, with the status of one that failed
done
