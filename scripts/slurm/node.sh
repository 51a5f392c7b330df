#!/usr/bin/env bash
# The trainer on one node, as a task of srun: torchrun with the ranks of this node. Variables come from common.sh.
set -euo pipefail

answers() { timeout 5 bash -c "exec 3<>/dev/tcp/$MASTER_ADDR/$MASTER_PORT" 2>/dev/null; }
fail() {
  echo "error: node $SLURM_NODEID of $SLURM_STEP_NUM_NODES on host $(hostname): $*" >&2
  exit 1
}

# torchrun waits a quarter of an hour, and its error does not name host, port and node
if ((SLURM_NODEID == 0)); then
  echo "$SLURM_STEP_ID" >"$STATE/step"
  if answers; then fail "port $MASTER_PORT of $MASTER_ADDR is in use by another program; give another MASTER_PORT"; fi
else
  until answers; do
    if ((SECONDS > MEETING_TIMEOUT_S)); then
      fail "nobody listened at $MASTER_ADDR:$MASTER_PORT for $MEETING_TIMEOUT_S s (MEETING_TIMEOUT_S): a wrong MASTER_ADDR, a firewall, or node 0 did not start"
    fi
    sleep 0.5
  done
fi
exec "$PYTHON" -m torch.distributed.run --nnodes "$SLURM_STEP_NUM_NODES" --node-rank "$SLURM_NODEID" \
  --nproc-per-node "$PROCESSES_PER_NODE" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" train.py "$@"
