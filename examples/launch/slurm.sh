#!/bin/bash
#SBATCH --job-name=forebay
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120      # so many seconds before the limit; to the processes of srun, and not to this shell
#SBATCH --requeue              # after a failure of a node, or when others go first: this job once more
#SBATCH --open-mode=append     # which goes on with this log
#
# A training that is longer than a job may be: each job goes on from what the one before has saved, and asks for the next
# until the run is finished. From the project's folder:
#
#     sbatch examples/launch/slurm.sh

export RUN=${RUN:-runs/ranks}
export UNTIL=${UNTIL-200}                      # the last step; empty where the run's own folder tells its end
SCRIPT=${SCRIPT:-examples/launch/slurm.sh}     # this file: Slurm runs a copy of it, which lies elsewhere
IDLE=${IDLE:-0}                                # so many jobs in a row have saved no further step
MOST_IDLE=${MOST_IDLE:-3}                      # and so many are enough

# Start the training; srun has one of these on each node. Without ranks it would be: srun python train.py "$RUN"
train() {
    local head=localhost
    if [[ -n ${SLURM_JOB_NODELIST:-} ]]; then
        head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    fi
    # What torchrun leaves its workers to save before it kills them; an older torch leaves them 30 s in any case.
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100
    export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}  # else two lines of warnings every 5 s while a rank waits
    srun torchrun --nnodes="${SLURM_NNODES:-1}" --nproc-per-node="${RANKS_PER_NODE:-2}" \
        --rdzv-backend=c10d --rdzv-id="${SLURM_JOB_ID:-0}" --rdzv-endpoint="$head:${PORT:-29400}" \
        examples/launch/train_ranks.py "$RUN" --steps "${UNTIL:-200}"
}

# Print the step that the newest generation is of; nothing where there is none.
saved_step() {
    forebay status "$RUN" --field newest.step || true
}

# Ask for the next job, if there is to be one. By what lies in the folder, and not by how srun ended: torchrun's exit code
# after a stop that went well is the same as after an error.
#   $1  the step that had been saved before this job
again() {
    local before=$1 now code=0
    forebay status "$RUN" ${UNTIL:+--until "$UNTIL"} || code=$?
    case $code in
        0) return 0 ;;
        3) ;;
        *)
            echo "no further job: forebay status says $code" >&2
            return "$code"
            ;;
    esac
    now=$(saved_step)
    if [[ $now == "$before" ]]; then IDLE=$((IDLE + 1)); else IDLE=0; fi
    if ((IDLE >= MOST_IDLE)); then
        echo "no further job: $IDLE in a row have saved no further step than ${now:-none}" >&2
        return 1
    fi
    IDLE=$IDLE sbatch --dependency="afterany:$SLURM_JOB_ID" "$SCRIPT"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then       # else somebody wants the functions alone
    before=$(saved_step)
    train
    again "$before"
fi
