#!/bin/bash
# Starts a program on N processes of this machine, also as root and on fewer cores.
# usage: launch.sh MPIRUN N PROGRAM [ARGUMENT...]; exit 77: there is no mpirun
set -u
mpirun=$1
processes=$2
shift 2
command -v "$mpirun" >/dev/null || { echo "SKIPPED: no mpirun here ($mpirun)"; exit 77; }

options=()
if "$mpirun" --version 2>&1 | grep -Eq 'Open MPI|OpenRTE'; then
    options=(--oversubscribe)
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
exec "$mpirun" -n "$processes" "${options[@]}" "$@"
