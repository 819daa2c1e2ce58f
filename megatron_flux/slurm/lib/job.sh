# shellcheck shell=bash
# What every job script does beside its own head, environment and command. A script sources this file and then calls
# `run_job`, the last thing it does: it trains on all nodes of the job and ends the script.
#
# The script sets, before it sources this file,
#   version             of this file that it is for: 1
# and after it, before run_job:
#   name                of the job's folder, NAME-JOB in $MEGATRON_FLUX_RUNS (default: runs where sbatch was called)
#   processes           ranks on each node
#   seed                of the first repetition; each task of an array is one more
#   max_requeues        how often in a row the job begins again without having saved something new
#   max_retries         how often it does because ranks failed
#   numa_binding        of torch.distributed.run, if any
#   srun_options        array: options of every step, such as --mpi=pmix
#   container_runtime   pyxis or apptainer, with container_image and the array container_mounts; none: Python is on the nodes
#   preflight           array: what nodes must have, options of megatron_flux.slurm.preflight.node; none: no pre-flight
#   preflight_timeout   seconds
#   link                p2p: what flux uses within a node, by MEGATRON_FLUX_LINK; the pre-flight may find that host memory is
#                       faster, or that peers' memory does not work
#   tune                array: options of `megatron-flux tune`, on the first node before training; none: no tuning
# and calls `default VARIABLE VALUE` for what ranks find in their environment. The arguments of run_job are those of
# `megatron-flux`: train or compare with options, without --seed, --out, --save, --load and --overwrite.
#
# Then the library
#   environment   unsets SLURM_* and SRUN_* of another job, inside which sbatch was called
#   pre-flight    has every node checked on its own, then all together. Bad nodes are left out by a requeue where they are
#                 fewer than a quarter, else the job fails. MEGATRON_FLUX_PREFLIGHT=0 skips it
#   signals       passes USR1 (--signal=B:USR1@SECONDS) on to the ranks, again and again until they have saved and
#                 ended; the job then requeues itself. On TERM of Slurm the ranks save too
#   requeue       resumes from the newest checkpoint in its folder, as does a job that `megatron-flux slurm resume`
#                 submits with MEGATRON_FLUX_JOB_FOLDER. A finished job that is started again ends at once
#   retry         after ranks failed, requeues without the nodes to blame, unless another node would not help
# No -e: every exit status that matters is looked at.

say() { printf 'megatron-flux: %s\n' "$*"; }
fail() {
    printf 'megatron-flux: error: %s\n' "$*" >&2
    [[ ! -d ${logs-} ]] || printf '%s\n' "$*" >"$logs/error"
    exit 1
}
# Whatever is in the environment.
logs='' name='' processes='' link='' seed=1234 max_requeues=3 max_retries=1 numa_binding='' preflight_timeout=600
container_runtime='' container_image='' container_mounts=() srun_options=() preflight=() tune=() _passed=()

[[ ${version-} == 1 ]] ||
    fail "the script is for version ${version:-0} of the library, ${library-job.sh} is version 1; render the script anew, or set MEGATRON_FLUX_JOB_LIBRARY to its library"

# Called inside another job, sbatch hands over that job's variables, from which srun takes options. Only those that Slurm
# sets for every job are this job's own; the rest is asked for below.
for variable in "${!SLURM_@}" "${!SRUN_@}"; do
    case $variable in
        SLURM_CONF | SLURM_JWT | SLURM_CLUSTER_NAME | SLURM_WORKING_CLUSTER | SLURM_SUBMIT_DIR | SLURM_TASKS_PER_NODE) ;;
        SLURM_JOB_ID | SLURM_JOBID | SLURM_JOB_N* | SLURM_JOB_PARTITION | SLURM_JOB_CPUS_PER_NODE) ;;
        SLURM_NNODES | SLURM_NODELIST | SLURM_NODE_ALIASES) ;;
        *) unset "$variable" ;;
    esac
done
record=$(scontrol show job "$SLURM_JOB_ID" --oneliner | grep -E "^JobId=$SLURM_JOB_ID( |\$)")
[[ -n $record ]] || fail "scontrol does not say what job $SLURM_JOB_ID is"
# _of_record VARIABLE FIELD: export what Slurm says of this job.
_of_record() { [[ "$record " =~ \ $2=([^\ \(]+)\  ]] && export "$1=${BASH_REMATCH[1]}"; }
_of_record SLURM_ARRAY_JOB_ID ArrayJobId
_of_record SLURM_ARRAY_TASK_ID ArrayTaskId
_of_record SLURM_RESTART_COUNT Restarts
_of_record SLURM_JOB_ACCOUNT Account
_of_record SLURM_JOB_QOS QOS
_of_record SLURM_CPUS_PER_TASK CPUs/Task
[[ ! ${SLURM_CPUS_PER_TASK-} =~ ^1$|N/A ]] || unset SLURM_CPUS_PER_TASK # not asked for

# default VARIABLE VALUE: export it. One that is set where sbatch is called wins.
default() {
    _passed+=("$1")
    [[ -v $1 ]] || export "$1=$2"
}

# Where Python runs: options of srun, and words before every command.
_place() {
    local mount mounted passed
    readonly runs=${MEGATRON_FLUX_RUNS:-$SLURM_SUBMIT_DIR/runs} python=${MEGATRON_FLUX_PYTHON:-python3}
    outside=() inside=()
    if [[ -n $container_runtime ]]; then mkdir -p "$runs" || fail "$runs cannot be made"; fi
    if [[ $container_runtime == pyxis ]]; then
        mounted=$SLURM_SUBMIT_DIR:$SLURM_SUBMIT_DIR,$runs:$runs
        for mount in ${container_mounts[@]+"${container_mounts[@]}"}; do mounted+=,$mount; done
        outside=(--container-image="$container_image" --container-mounts="$mounted" --container-workdir="$PWD")
        passed=$(IFS=, && printf '%s' "${_passed[*]}")
        [[ -z $passed ]] || outside+=(--container-env="$passed") # the image's own values would win
    elif [[ $container_runtime == apptainer ]]; then
        inside=(apptainer exec --nv --bind "$SLURM_SUBMIT_DIR" --bind "$runs" --pwd "$PWD")
        for mount in ${container_mounts[@]+"${container_mounts[@]}"}; do inside+=(--bind "$mount"); done
        inside+=("$container_image")
    elif [[ -n $container_runtime ]]; then
        fail "container_runtime=$container_runtime; give pyxis or apptainer, or leave it out"
    fi
    default MEGATRON_FLUX_CACHE "$runs/cache"
}

# The saved steps, as this start finds them. Recorded steps would not do: those after a checkpoint are lost.
_saved() { cat "$checkpoints"/{,*/}latest_checkpointed_iteration.txt 2>/dev/null; }

# Sets `spent`: how often this job has been requeued since it last saved something new.
_count_requeues() {
    local from=$start
    while ((from >= start - restart)) && [[ $(cat "$work/logs/$from/saved" 2>/dev/null) == "$(_saved)" ]]; do
        from=$((from - 1))
    done
    spent=$((from < start ? start - from - 1 : 0))
}

# The job's numbers, folders and meeting point.
_prepare() {
    local address
    [[ -n $name && -n $processes ]] || fail "the script must set name and processes before run_job"
    readonly restart=${SLURM_RESTART_COUNT:-0} max_requeues max_retries
    readonly nodes=$SLURM_JOB_NUM_NODES repetition=${SLURM_ARRAY_TASK_ID:-0}
    # This task alone: by the number of an array's last task, Slurm means the whole array.
    readonly me=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}
    # A job that `megatron-flux slurm resume` submits goes on in the folder of the one before.
    readonly root=${MEGATRON_FLUX_JOB_FOLDER:-$runs/$name-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}
    readonly work=$root/rep-$repetition
    start=0
    while [[ -d $work/logs/$start ]]; do start=$((start + 1)); done
    readonly start run=$work/run checkpoints=$work/checkpoints logs=$work/logs/$start
    mkdir -p "$logs" || fail "$logs cannot be made; set MEGATRON_FLUX_RUNS to a folder that all nodes share"
    _saved >"$logs/saved"
    _count_requeues
    # Kept with the job: the same plans after a requeue or a resume, and none that another job is writing.
    default MEGATRON_FLUX_TUNE_CACHE "$work/tuned.json"
    # When NCCL's watchdog gives up a collective, torch's flight recorder writes the calls of each rank to a file of this
    # start with the rank's number.
    default TORCH_FR_DUMP_TEMP_FILE "$logs/flight-recorder/rank_"
    default TORCH_FR_BUFFER_SIZE 2000
    default TORCH_NCCL_DUMP_ON_TIMEOUT 1
    mkdir -p "$(dirname "$TORCH_FR_DUMP_TEMP_FILE")" || fail "no folder for $TORCH_FR_DUMP_TEMP_FILE"
    # `status` and `resume` read this, for jobs submitted in any way.
    readlink "/proc/$$/fd/1" >"$logs/log"
    [[ -e $root/job.sbatch ]] || cp "$0" "$root/job.sbatch"
    printf '%s\n' "$SLURM_SUBMIT_DIR" "partition=${SLURM_JOB_PARTITION-}" "account=${SLURM_JOB_ACCOUNT-}" "qos=${SLURM_JOB_QOS-}" >"$root/submitted"

    # All ranks meet at the job's first node. Its address is the one that Slurm itself uses; ports come from the job's id.
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    address=$(scontrol show node "$first" --oneliner | grep -o 'NodeAddr=[^ ]*')
    readonly master=${MEGATRON_FLUX_MASTER_ADDR:-${address#NodeAddr=}}
    readonly port=$((10000 + SLURM_JOB_ID % 10000 * 2))
    [[ -n $master ]] || fail "no address of $first; set MEGATRON_FLUX_MASTER_ADDR"
    if [[ $container_runtime == pyxis ]]; then
        outside+=(--container-name="megatron-flux-$SLURM_JOB_ID") # the first step unpacks the image, the others find it
        trap _drop_container EXIT
    fi
    # What ends a step early: before training there is nothing to save.
    request=TERM stopping=0 step='' repeater=''
    trap _asked_to_stop USR1
}

# _launcher PORT ...: torch.distributed.run on a node, for its ranks.
_launcher() {
    command=(
        "$python" -m megatron_flux.run.node --nnodes="$nodes" --nproc-per-node="$processes"
        --master-addr="$master" --master-port="$1" --max-restarts=0
        ${numa_binding:+--numa-binding="$numa_binding"}
        "${@:2}"
    )
}

# Slurm sends USR1 to this shell alone. The ranks get it again and again, until they have seen it and ended.
_pass_on() {
    [[ -z $repeater ]] || return 0
    while kill -"$request" "$step" 2>/dev/null; do sleep 10; done &
    repeater=$!
}
# shellcheck disable=SC2317,SC2329 # called by the trap
_asked_to_stop() {
    stopping=1
    say "time is nearly up: asking the ranks to save and stop"
    [[ -z $step ]] || _pass_on
}

# What a task begins with: a log of its own, deaf to signals until a rank says what it does on them, and compiled kernels
# on the node's own disk, where no other node's ranks write. Code is run from there, so it must be this user's folder.
# shellcheck disable=SC2016 # the task expands it
_task=(bash -c '
trap "" USR1 USR2
exec >>"$1-$SLURM_NODEID-$SLURMD_NODENAME.log" 2>&1
if [[ -z ${TRITON_CACHE_DIR-} ]]; then
    mine=${TMPDIR:-/tmp}/megatron-flux-$UID
    export TRITON_CACHE_DIR=$mine/${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}-$SLURMD_NODENAME/triton
    if ! mkdir -p -m 700 "$mine" || [[ -L $mine || ! -O $mine ]] || ! mkdir -p "$TRITON_CACHE_DIR"; then
        why="no folder of this user for compiled kernels at $mine; set TRITON_CACHE_DIR to a folder on the nodes"
        echo "0 0 $SLURMD_NODENAME: $why" | tee "$MEGATRON_FLUX_FAILURES/$SLURMD_NODENAME"
        exit 1
    fi
    [[ $2 != apptainer ]] || export APPTAINER_BIND=${APPTAINER_BIND:+$APPTAINER_BIND,}$TRITON_CACHE_DIR
    find "$mine" -mindepth 1 -maxdepth 1 -mtime +14 -exec rm -rf {} +
fi
exec "${@:2}"' bash)

# What srun itself has written since the last step began: tasks have logs of their own.
_srun_said() { [[ ! -f /proc/$$/fd/2 ]] || tail -c "+$((log_size + 1))" "/proc/$$/fd/2" | grep -v '^megatron-flux: '; }

# _has_started STEP: a step that has failed; one that srun did not start on any node ends the job.
_has_started() {
    local said
    if ((status == 0)) || compgen -G "$logs/$1-[0-9]*.log" >/dev/null; then return; fi
    said=$(_srun_said | grep -m 1 -iE 'error|fatal|not found|unrecognized|invalid')
    fail "srun has not started the step $1 on any node: ${said:-it ended with status $status}"
}

# _on_nodes NODES LOG OPTION COMMAND...: a step with one task per node and a log for each; its status.
_on_nodes() {
    local status
    log_size=$(stat --dereference --format=%s "/proc/$$/fd/2")
    export MEGATRON_FLUX_FAILURES=$logs/failures/$2
    mkdir -p "$MEGATRON_FLUX_FAILURES"
    # srun dies of a USR1 that comes before it passes it on.
    (
        trap '' USR1
        exec srun --nodes="$1" --ntasks="$1" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 "$3" \
            ${srun_options[@]+"${srun_options[@]}"} \
            ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} ${outside[@]+"${outside[@]}"} \
            "${_task[@]}" "$logs/$2" ${inside[@]+"${inside[@]}"} "${@:4}"
    ) &
    step=$!
    if ((stopping)); then _pass_on; fi
    while true; do
        wait "$step"
        status=$?
        # The trap ends `wait`, not the step.
        if ((status <= 128)) || ! kill -0 "$step" 2>/dev/null; then break; fi
    done
    if [[ -n $repeater ]]; then { kill "$repeater"; wait "$repeater"; } 2>/dev/null; fi
    step='' repeater=''
    return "$status"
}

# Pyxis drops a named container with its job only where it is set so (container_scope=job).
_drop_container() {
    [[ $container_runtime == pyxis ]] || return 0
    timeout 120 srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 \
        enroot remove --force "pyxis_megatron-flux-$SLURM_JOB_ID" &>/dev/null
    trap - EXIT
}

# For the end of a line: the flight recorder's dumps of this start, if there are some.
_dumps() {
    local found
    found=$(find "$TORCH_FR_DUMP_TEMP_FILE"* -newer "$logs/log" 2>/dev/null | wc -l)
    ((found == 0)) || printf '%s' "; $found rank(s) left their calls: $TORCH_FR_DUMP_TEMP_FILE*"
}

# What failed first: the ranks' launchers leave lines that sort by cause and order.
_failures() { cat "$MEGATRON_FLUX_FAILURES"/* 2>/dev/null | LC_ALL=C sort -k 1,1n -k 2,2n; }

# The nodes to blame: that of the first failure, or of all ranks that gave no answer (2). A rank that only missed another
# one (3) is a witness: its node is none of them.
_blamed() {
    _failures | awk 'NR == 1 { order = $1 }
        $1 == order && (order == 2 || NR == 1 && order != 3) && $5 == "on" && !said[$6]++ { printf "%s%s", comma, $6; comma = "," }'
}

# Nodes of this partition that work, other than those of a list.
_usable_without() {
    sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" --format='%N %t' |
        grep -E ' (idle|mix|alloc|comp|resv|plnd)[-~#!%]?$' | cut -d ' ' -f 1 | sort -u |
        grep -cvxFf <(scontrol show hostnames "$1" 2>/dev/null)
}

# _excluded NODES: the nodes that this job leaves out already, and these.
_excluded() {
    local before
    before=$(scontrol show job "$me" --oneliner | grep -o 'ExcNodeList=[^ ]*')
    before=${before#ExcNodeList=}
    before=${before/'(null)'/}
    printf '%s' "${before:+$before${1:+,}}$1"
}

# _requeue_without NODES: begin again on other nodes than those of the list; returns where that cannot be.
_requeue_without() {
    # Slurm takes the list only from a job that waits, and ends this shell as soon as it does.
    trap '' TERM
    _drop_container
    # The repetitions that wait; of this one it is refused.
    [[ ! -v SLURM_ARRAY_JOB_ID ]] || scontrol update jobid="$SLURM_ARRAY_JOB_ID" ExcNodeList="$1" &>/dev/null
    scontrol requeue "$me" || { say "it cannot be requeued"; return; }
    for _ in {1..50}; do
        scontrol update jobid="$me" ExcNodeList="$1" && exit 0
        sleep 0.2
    done
    say "$1 could not be left out: the next start may get them again"
    exit 0
}

# _can_do_without NODES: there are nodes and requeues left; if not, it says so.
_can_do_without() {
    if ((spent >= max_requeues)); then
        say "not retried: this job has been requeued $spent time(s) since it last saved, and $max_requeues is the limit"
    elif (($(_usable_without "$1") < nodes)); then
        say "not retried: without $1, partition $SLURM_JOB_PARTITION has fewer than $nodes nodes that work"
    else
        return 0
    fi
    return 1
}

# _retry NODES CAUSE: requeue without the nodes to blame, if any; returns where that is of no use, and says why.
_retry() {
    local without count
    count=$(grep -c '^retry ' "$work/retries" 2>/dev/null)
    without=$(_excluded "$1")
    if [[ $2 == *"(exit code 2)" ]]; then
        say "not retried: what it was given is wrong on any node"
    elif [[ $2 =~ failed:\ (StorageError|FluxError): ]]; then
        say "not retried: no node is to blame for it"
    elif ((count >= max_retries)); then
        say "not retried: it has been ${count:-0} time(s), and $max_retries is the limit"
    elif _can_do_without "$without"; then
        say "retry $((count + 1)) of at most $max_retries, without ${1:-leaving out a node}: $2$(_dumps)"
        printf 'retry without %s\n' "${1:-none}" >>"$work/retries"
        _requeue_without "$without"
    fi
}

# _failed STEP: its ranks have; _retry without the node of the first, or end.
_failed() {
    local order cause node log
    _has_started "$1"
    read -r order _ cause < <(_failures)
    node=$(_blamed)
    log=${node%%,*}
    tail -n 20 "$logs/$1"-*-"${log:-$first}".log
    [[ -z $node && $order != 3 ]] || _retry "$node" "$cause"
    fail "${cause:-the ranks of $1 ended with status $status and left no account}; logs in $logs$(_dumps)"
}

_requeue() {
    ((spent < max_requeues)) ||
        fail "not requeued: this job has been $spent time(s) since it last saved, and $max_requeues is the limit; what was saved is in $checkpoints"
    say "requeue $((spent + 1)) of at most $max_requeues"
    _drop_container # the job may begin again on other nodes
    scontrol requeue "$me" || fail "cannot be requeued; what was saved is in $checkpoints"
    exit 0
}

_ended_as() { [[ -f $run/ended.json ]] && grep -q "\"state\": \"$1\"" "$run/ended.json"; }

# What a node has found, or all together, is in files: requeue without the bad nodes where they are few, or end. Returns
# where there are no such files.
_preflight_failed() {
    local node problems bad advice=''
    # What all nodes say alike is said once.
    problems=$(awk -v nodes="$nodes" '
        { line[NR] = $0; what[NR] = substr($0, index($0, ": ") + 2); count[what[NR]]++ }
        END {
            for (i = 1; i <= NR; i++)
                if (nodes == 1 || count[what[i]] < nodes) print line[i]
                else if (!said[what[i]]++) print "all " nodes " nodes: " what[i]
        }' "$logs"/preflight/*.problems 2>/dev/null)
    [[ -n $problems ]] || return
    printf '%s\n' "$problems"
    for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
        ! grep -qs "^$node: " "$logs"/preflight/*.problems || set -- "$@" "$node"
    done
    bad=$(IFS=, && printf '%s' "$*")
    if (($# > 0 && 4 * $# < nodes)) && _can_do_without "$(_excluded "$bad")"; then
        say "requeue $((spent + 1)) of at most $max_requeues, without $bad"
        printf 'pre-flight without %s\n' "$bad" >>"$work/retries"
        _requeue_without "$(_excluded "$bad")"
    fi
    (($# % nodes == 0)) || advice="; leave bad nodes out with sbatch --exclude=$bad"
    fail "pre-flight stopped the job: ${problems%%$'\n'*}$advice"
}

_check_nodes() {
    local expected node cause='' last why
    say "pre-flight: every node on its own, then all together"
    expected=(
        --folder="$logs/preflight" --processes="$processes" --timeout="$preflight_timeout"
        ${numa_binding:+--needs-numactl} "${preflight[@]}"
    )
    # Every node shall say what is wrong with it: none is ended because another is bad.
    mkdir -p "$logs/preflight"
    _on_nodes "$nodes" preflight --kill-on-bad-exit=0 \
        timeout --kill-after=30 "$preflight_timeout" "$python" -m megatron_flux.slurm.preflight.node "${expected[@]}"
    status=$?
    if ((status != 0)); then
        ((stopping)) && _requeue
        _has_started preflight
        for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
            compgen -G "$logs/preflight/$node.*" >/dev/null && continue
            cause=$(cut -d ' ' -f 3- "$MEGATRON_FLUX_FAILURES/$node" 2>/dev/null)
            last=$(tail -q -n 1 "$logs"/preflight-[0-9]*-"$node".log 2>/dev/null)
            last=${last:-$(_srun_said | grep -m 1 -wF "$node")}
            echo "${cause:-$node: no answer${last:+; its last word: $last}}" >"$logs/preflight/$node.problems"
        done
        _preflight_failed
    fi
    _launcher "$port" -m megatron_flux.slurm.preflight.ranks "${expected[@]}"
    _on_nodes "$nodes" preflight-together --wait=60 "${command[@]}"
    status=$?
    if ((status != 0)); then
        ((stopping)) && _requeue
        _preflight_failed
        # There is a link from when all else was well: it holds if measuring another one has ended the ranks.
        [[ -s $logs/preflight/link ]] || _failed preflight-together
        read -r _ _ cause < <(_failures)
    fi
    if [[ -s $logs/preflight/link ]]; then
        read -r link why <"$logs/preflight/link"
        say "pre-flight: flux's link is $link: $why${cause:+ ($cause)}"
    fi
}

# run_job COMMAND OPTIONS...: train, or compare, on all nodes of the job.
run_job() {
    local resume folder folders=('')
    set -uo pipefail
    _place
    _prepare
    say "$1 as job $SLURM_JOB_ID, start $start, on $SLURM_JOB_NODELIST; logs in $logs"
    ((spent <= max_requeues)) || fail "started again $spent times since it last saved, $max_requeues is the limit; see the logs of earlier starts"
    if _ended_as finished; then
        say "was finished before it was started again"
        exit 0
    fi
    if ((${#preflight[@]})) && [[ ${MEGATRON_FLUX_PREFLIGHT:-1} != 0 ]]; then _check_nodes; fi
    if [[ -n $link ]]; then
        export MEGATRON_FLUX_LINK=${MEGATRON_FLUX_LINK:-$link}
        [[ $MEGATRON_FLUX_LINK == p2p ]] || tune=() # groups share host memory: one alone finds it too fast
    fi
    if ((${#tune[@]})); then
        say "tuning the operators' calls on $first, once for all nodes"
        _on_nodes 1 tune --wait=0 "$python" -m megatron_flux.cli tune "${tune[@]}" ||
            say "tuning ahead failed, see $logs; every call is then tuned when it first comes"
    fi

    resume=(--load="$checkpoints")
    [[ $1 != compare ]] || folders=(baseline/ flux/)
    for folder in "${folders[@]}"; do
        [[ -s $checkpoints/${folder}latest_checkpointed_iteration.txt ]] || resume=(--overwrite)
    done
    ((stopping)) && _requeue
    _launcher $((port + 1)) -m megatron_flux.cli "$@" --seed=$((seed + repetition)) --out="$run" --save="$checkpoints" "${resume[@]}"
    say "training: ${resume[*]}; the first node's log is $logs/train-0-$first.log"
    request=USR1
    _on_nodes "$nodes" train --wait=60 "${command[@]}"
    status=$?
    _count_requeues

    if ((status == 0)) && _ended_as finished; then
        say "finished; results in $run"
        exit 0
    fi
    # Slurm may have signalled the steps and not this shell, with USR1 or, to take the nodes back, TERM (143).
    if ((status == 0 || status == 143)) && _ended_as stopped; then
        _requeue
    fi
    _failed train
}
