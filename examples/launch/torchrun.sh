#!/bin/bash
# Ranks on one machine, started again until the run is finished: after a stop, after a kill, after a failed rank.
#
#     examples/launch/torchrun.sh
#
# Ends with the exit code of `forebay status`: 0 finished, 3 stopped and to be continued, 1 broken. A SIGTERM or Ctrl-C
# that it gets itself is passed on, once, and ends it when the ranks have saved.

RUN=${RUN:-runs/ranks}
UNTIL=${UNTIL:-200}
MOST_IDLE=${MOST_IDLE:-3}                      # so many times in a row without a further step are enough
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}  # else two lines of warnings every 5 s while a rank waits

stopped=""
child=""
stop() {
    stopped=yes
    [[ -n $child ]] && kill -TERM "$child"
}
trap stop TERM INT

saved_step() {
    forebay status "$RUN" --field newest.step || true
}

idle=0
step=$(saved_step)
while [[ -z $stopped ]]; do
    # In a process group of its own: a Ctrl-C of the terminal reaches this script alone, and torchrun through it.
    setsid torchrun --standalone --nproc-per-node="${RANKS:-2}" \
        examples/launch/train_ranks.py "$RUN" --steps "$UNTIL" &
    child=$!
    while kill -0 "$child" 2> /dev/null; do wait "$child"; done  # a signal ends a wait, and not the child
    child=""
    code=0
    forebay status "$RUN" --until "$UNTIL" || code=$?
    [[ $code == 3 ]] || exit "$code"
    before=$step
    step=$(saved_step)
    if [[ $step == "$before" ]]; then idle=$((idle + 1)); else idle=0; fi
    if ((idle >= MOST_IDLE)); then
        echo "$idle times in a row no further step than ${step:-none} was saved" >&2
        exit 1
    fi
done
exit 3
