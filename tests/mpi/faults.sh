#!/bin/bash
# Every fault of one process x phase x moment, by mpi_faults: the other processes must return
# RA_E_COMM within the time-out (0.5 s) + 2 s, naming a rank and the hop, and live.
# usage: faults.sh MPIRUN MPI_FAULTS; exit 77: no launcher here lets survivors live
set -u
mpirun=$1
program=$2
command -v "$mpirun" >/dev/null || { echo "SKIPPED: no mpirun here ($mpirun)"; exit 77; }
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
failures=0
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

# Options with which a killed process does not take the others along. MPICH's launcher looks at how
# its own child ends, so there a shell stands between.
shell=()
no_kill_at=
case $("$mpirun" --version 2>&1) in
*'Open MPI'* | *OpenRTE*) options=(--oversubscribe --enable-recovery) ;;
*HYDRA*)
    options=(-disable-auto-cleanup)
    no_kill_at='n/a: UCX below MPICH aborts a process whose peer is killed in the middle of a copy'
    # shellcheck disable=SC2016 # expanded by that shell
    shell=(bash -c 'trap "" USR1; "$0" "$@"; true')
    ;;
*)
    echo "SKIPPED: killing a rank is n/a: this mpirun has no known option to let survivors live"
    exit 77
    ;;
esac

world() { # world RANKS FAULT PHASE MOMENT CALL
    local ranks=$1 fault=$2 dir=$work/$1-$2-$3-$4-$5 rank bad='' worst=0 parked=0 line
    mkdir "$dir"
    timeout -s KILL 60 "$mpirun" "${options[@]}" -n "$ranks" "${shell[@]}" "$program" "$dir" "${@:2}" \
        >"$dir/log" 2>&1
    for ((rank = 0; rank < ranks; rank++)); do
        [ "$fault" = kill ] && [ $rank = 1 ] && continue
        line=$(cat "$dir/rank.$rank" 2>/dev/null || echo 'nothing 0 0 said')
        read -r status seconds requests message <<<"$line"
        parked=$((parked + requests))
        if [ "$fault" = none ]; then
            [ "$status" = RA_OK ] || bad="$bad; rank $rank: $line"
            continue
        fi
        [ "$status" = RA_E_COMM ] || bad="$bad; rank $rank: $line"
        [ $rank = 1 ] && continue # its own words; it may have slept
        [[ $message == *rank\ * && $message == *hop\ * ]] || bad="$bad; rank $rank: $line"
        awk "BEGIN { exit !($seconds < 2.5) }" || bad="$bad; rank $rank late: $line"
        worst=$(awk "BEGIN { print ($seconds > $worst) ? $seconds : $worst }")
    done
    printf '%-6s %-8s %-6s exchange %d of %d ranks: %4.2f s, %d requests parked: %s\n' \
        "$fault" "$3" "$4" "$5" "$ranks" "$worst" "$parked" "${bad:-ok}"
    [ -z "$bad" ] || { failures=$((failures + 1)); tail -n 5 "$dir/log"; }
}

faults='kill stop slow error'
world 2 none forward before 1
for fault in $faults; do
    for phase in forward backward; do
        for moment in before at after; do
            if [ "$fault $moment" = 'kill at' ] && [ -n "$no_kill_at" ]; then
                echo "kill   $phase at: $no_kill_at"
                continue
            fi
            world 2 "$fault" $phase $moment 1
        done
    done
done
world 3 none forward before 1
for fault in $faults; do # the last exchange of a call: what follows it is found by the next call
    world 3 "$fault" forward after 2
    world 3 "$fault" backward before 2
done
echo "link cut: n/a: processes of one host exchange through memory, which cannot be cut; see hosts.sh"
echo "faults: $failures failed"
[ $failures = 0 ]
