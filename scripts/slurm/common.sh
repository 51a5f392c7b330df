# shellcheck shell=bash
# Shared by the batch scripts, which source it. They run on the first node of the job, like rank 0.
#
# Preemption. SLURM sends SIGTERM to the trainer (preemption, scancel --signal=TERM, scontrol requeue) or to the batch
# script (two minutes before the time limit, see --signal below). The ranks finish their rollout, save, and exit with
# status 75. Rank 0 writes it to $STATE/status, because torchrun has the same status for every failure. The job then
# requeues itself under the same id and resumes from its checkpoint. If requeueing is disabled it exits with status 75
# instead: submit it again.

: "${SLURM_JOB_ID:?run this with sbatch}"
export REPOSITORY=${REPOSITORY:-$SLURM_SUBMIT_DIR}
export PYTHON=${PYTHON:-$REPOSITORY/.venv/bin/python}
export PROCESSES_PER_NODE=${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${SAVE_GRACE_S:-1800} # torchrun kills its ranks after this; SLURM's own limit comes first
export MEETING_TIMEOUT_S=${MEETING_TIMEOUT_S:-600}
MAX_REQUEUES=${MAX_REQUEUES:-100}
MAX_RESTARTS=${MAX_RESTARTS:-10}
RESTART_WAIT_S=${RESTART_WAIT_S:-30}
TERMINATED=
HOSTS=() # one per node of the job, in SLURM's order
while read -r host; do HOSTS+=("$host"); done < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${MASTER_ADDR:-${HOSTS[0]}}
STATE=$(mktemp -d)
export STATE
export SLIME_LIKE_STATUS_FILE=$STATE/status
trap 'rm -rf "$STATE"' EXIT
cd "$REPOSITORY" || exit

# nodes_left NODES: the first NODES nodes of the job that still respond to SLURM.
nodes_left() {
  local first
  first=$(IFS=,; echo "${HOSTS[*]:0:$1}")
  sinfo --noheader --Node --nodes "$first" --format '%N %t' | awk '$2 !~ /^down|\*$/ && !seen[$1]++ { print $1 }'
}

# run_trainer NODES FLAG...: train on the first NODES nodes until it ends; sets STATUS. With MIN_NODES, restart on the
# remaining nodes from the newest checkpoint when a node is lost.
run_trainer() {
  local most=$1 starts=0 left
  shift
  start_trainer "$most" "" "$@"
  [[ -n ${MIN_NODES:-} ]] || return 0
  while ((STATUS != 0)) && [[ -z $TERMINATED && ! $(cat "$STATE/status" 2>/dev/null) =~ ^(2|75|130)$ ]]; do
    if ((++starts > MAX_RESTARTS)); then
      echo "the trainer failed again after $MAX_RESTARTS restarts (MAX_RESTARTS)"
      return 0
    fi
    sleep "$RESTART_WAIT_S"
    if [[ -n $TERMINATED ]]; then # meanwhile: requeue, whatever the lost ranks left
      rm -f "$STATE/status"
      return 0
    fi
    mapfile -t left < <(nodes_left "$most")
    if ((${#left[@]} < MIN_NODES)); then
      echo "${#left[@]} of $most node(s) are left, and MIN_NODES is $MIN_NODES"
      return 0
    fi
    echo "restart $starts of $MAX_RESTARTS on ${#left[@]} of $most node(s)"
    rm -f "$STATE/status"
    start_trainer "${#left[@]}" "$(IFS=,; echo "${left[*]}")" "$@"
  done
}

# start_trainer NODES LIST FLAG...: on the nodes of LIST, or on the first NODES if it is empty.
start_trainer() {
  local nodes=$1 where=(--relative 0)
  if [[ -n $2 ]]; then where=(--nodelist "$2"); fi
  shift 2
  echo "$nodes node(s) x $PROCESSES_PER_NODE process(es), meeting at $MASTER_ADDR:$MASTER_PORT, start ${SLURM_RESTART_COUNT:-0}"
  srun --nodes "$nodes" --ntasks "$nodes" --ntasks-per-node 1 "${where[@]}" --kill-on-bad-exit=1 \
    bash "$REPOSITORY/scripts/slurm/node.sh" "$@" &
  local srun=$!
  # not to srun itself, which would kill the ranks at once
  trap 'TERMINATED=1; echo "SIGTERM: the ranks save after this rollout"; scancel --signal=TERM "$SLURM_JOB_ID.$(cat "$STATE/step")" || true' TERM
  wait "$srun" || true
  while kill -0 "$srun" 2>/dev/null; do # a signal ends wait before srun ends
    wait "$srun" || true
  done
  STATUS=0 # of srun, which may have ended while the trap ran: bash keeps it
  wait "$srun" || STATUS=$?
}

# finish: exit like the trainer, or requeue the job.
finish() {
  local left
  left=$(cat "$STATE/status" 2>/dev/null || true)
  if ((STATUS == 0)); then exit 0; fi
  if [[ $left == 75 || (-n $TERMINATED && -z $left) ]]; then
    if ((${SLURM_RESTART_COUNT:-0} >= MAX_REQUEUES)); then
      echo "stopped by SIGTERM after $MAX_REQUEUES requeues (MAX_REQUEUES): not requeued again"
    elif scontrol requeue "$SLURM_JOB_ID"; then
      echo "stopped by SIGTERM: requeued"
      sleep 60 & # SLURM ends this script
      wait $!
    else
      echo "stopped by SIGTERM, and SLURM does not requeue this job: submit it again"
    fi
    exit 75
  fi
  echo "the trainer ended with status ${left:-$STATUS}"
  exit "$STATUS"
}
