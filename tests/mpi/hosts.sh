#!/bin/bash
# Two hosts of one machine: network namespaces with a link between them, two MPI processes in each,
# TCP everywhere. A golden case must come out right over the link; then the link is cut in the
# middle of a run, and all four processes must return RA_E_COMM within the time-out (0.5 s) + 2 s.
# usage: hosts.sh MPIRUN RINGATTN MPI_FAULTS CASE; exit 77: no such namespaces can be made here
set -u
mpirun=$1
ringattn=$2
faults=$3
case=$4

skip() {
    echo "SKIPPED: $1"
    exit 77
}
command -v "$mpirun" >/dev/null || skip "no mpirun here ($mpirun)"
"$mpirun" --version 2>&1 | grep -Eq 'Open MPI|OpenRTE' || skip 'this mpirun is not that of Open MPI'
[ "$(id -u)" = 0 ] || skip 'network namespaces need root'
for tool in ip unshare; do
    command -v $tool >/dev/null || skip "no $tool here"
done

a=ringattn-$$-a
b=ringattn-$$-b
link=ra$$
work=$(mktemp -d) || exit 1
job=
clean() {
    [ -z "$job" ] || kill -KILL "$job" 2>/dev/null
    ip netns del $a 2>/dev/null
    ip netns del $b 2>/dev/null
    rm -rf "$work"
}
trap clean EXIT
failures=0

{
    ip netns add $a && ip netns add $b &&
        ip link add name $link netns $a type veth peer name $link netns $b
} 2>"$work/err" || skip "namespaces: $(tr '\n' ' ' <"$work/err")"
for host in $a:10.77.0.1 $b:10.77.0.2; do
    ip -n "${host%:*}" addr add "${host#*:}/24" dev $link
    ip -n "${host%:*}" link set lo up
    ip -n "${host%:*}" link set $link up
done

# On the other host: its network and a name of its own, so that no process takes the other host's
# for a neighbour with whom it could share memory.
cat >"$work/on" <<'END'
#!/bin/bash
# usage: on NAMESPACE COMMAND...
exec ip netns exec "$1" unshare --uts bash -c \
    'echo "$0" >/proc/sys/kernel/hostname; exec "$@"' "$1" "${@:2}"
END
cat >"$work/agent" <<END
#!/bin/bash
# usage: agent ADDRESS COMMAND...; the only address that needs an agent is that of the second host
exec "$work/on" $b bash -c "\${*:2}"
END
chmod +x "$work/on" "$work/agent"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
net=10.77.0.0/24
launch=("$work/on" "$a" "$mpirun" -n 4 --host '10.77.0.1:2,10.77.0.2:2'
    --mca plm_rsh_agent "$work/agent" --mca pml ob1 --mca btl 'tcp,self'
    --mca btl_tcp_if_include "$net" --mca oob_tcp_if_include "$net")

carried() { # bytes that went over the link so far
    local sum=0 count
    for count in rx tx; do
        count=$(ip netns exec $a cat /sys/class/net/$link/statistics/${count}_bytes)
        sum=$((sum + count))
    done
    echo $sum
}

# ---- a golden case. Ranks 0 and 1 are here, 2 and 3 there: 8 of the 12 ways are over the link.
before=$(carried)
timeout -s KILL 120 "${launch[@]}" "$ringattn" check "$case" --transport mpi --layout zigzag \
    >"$work/out" 2>&1
status=$?
over=$(($(carried) - before))
sent=$(awk '$1 ~ /^[0-3]$/ { gsub(",", ""); sum += $4 + $5 } END { print sum + 0 }' "$work/out")
if [ $status = 0 ] && grep -q '^  pass' "$work/out" && [ "$over" -gt $((sent / 2)) ] &&
    [ "$sent" -gt 0 ]; then
    echo "golden case on two hosts: ok, $sent bytes sent by the ranks, $over over the link"
else
    echo "FAILED: golden case, exit $status, $sent bytes sent by the ranks, $over over the link"
    tail -n 20 "$work/out"
    failures=1
fi

# ---- the link is cut when rank 1 asks for it
cut() { # cut PHASE MOMENT
    local dir=$work/$1-$2 rank waited bad='' worst=0 line
    mkdir "$dir"
    "${launch[@]}" "$faults" "$dir" cut "$1" "$2" 1 >"$dir/log" 2>&1 &
    job=$!
    for ((waited = 0; waited < 1000; waited++)); do
        [ ! -e "$dir/cut.asked" ] || break
        sleep 0.02
    done
    ip -n $a link set $link down
    touch "$dir/cut.done"
    for ((waited = 0; waited < 500; waited++)); do
        [ "$(find "$dir" -name 'rank.*' | wc -l)" -lt 4 ] || break
        sleep 0.02
    done
    ip -n $a link set $link up # for the launcher, which waits for the other host
    for ((waited = 0; waited < 500; waited++)); do
        kill -0 $job 2>/dev/null || break
        sleep 0.02
    done
    kill -KILL $job 2>/dev/null
    wait $job 2>/dev/null
    job=
    for rank in 0 1 2 3; do
        line=$(cat "$dir/rank.$rank" 2>/dev/null || echo 'nothing 0 0 said')
        read -r status seconds _ message <<<"$line"
        [ "$status" = RA_E_COMM ] && [[ $message == *rank\ * && $message == *hop\ * ]] ||
            bad="$bad; rank $rank: $line"
        awk "BEGIN { exit !($seconds < 2.5) }" || bad="$bad; rank $rank late: $line"
        worst=$(awk "BEGIN { print ($seconds > $worst) ? $seconds : $worst }")
    done
    printf 'link cut %-8s %-6s an exchange: %4.2f s: %s\n' "$1" "$2" "$worst" "${bad:-ok}"
    [ -z "$bad" ] || { failures=$((failures + 1)); tail -n 5 "$dir/log"; }
}
for phase in forward backward; do
    for moment in before at after; do
        cut $phase $moment
    done
done
echo "hosts: $failures failed"
[ $failures = 0 ]
