#!/bin/sh
# Makes sure that what a build needs is installed, and says what it installs. Does nothing, and
# uses no network, when all is there.
# usage: setup.sh [demo|bench|check|python|mpi|lint|fuzz|ci]    what is to be done; default demo
set -eu

purpose=${1:-demo}
missing=

need() { # need PACKAGE COMMAND...: the package is missing if the command fails
    package=$1
    shift
    "$@" >/dev/null 2>&1 || missing="$missing $package"
}
has() { command -v "$1" >/dev/null 2>&1; }
cmake_is_new() {
    has cmake && cmake --version | awk 'NR == 1 { split($3, v, ".")
        exit !(v[1] > 3 || (v[1] == 3 && v[2] >= 25)) }'
}
fuzzer_links() {
    dir=$(mktemp -d)
    echo 'int LLVMFuzzerTestOneInput(const char *d, unsigned long n); int LLVMFuzzerTestOneInput(const char *d, unsigned long n) { return d && n ? 0 : 0; }' >"$dir/f.c"
    result=0
    clang -fsanitize=fuzzer,address,undefined "$dir/f.c" -o "$dir/f" || result=1
    rm -rf "$dir"
    return $result
}

python_headers='import os, sysconfig
open(os.path.join(sysconfig.get_path("include"), "Python.h")).close()'

need gcc has "${CC:-cc}"
need libc6-dev test -e /usr/include/stdio.h
need make has make
need cmake cmake_is_new
need pkgconf has pkg-config
need libjansson-dev pkg-config --exists jansson
case $purpose in
demo) ;;
bench) need python3 has python3 ;;
check) need libcmocka-dev pkg-config --exists cmocka ;;
python)
    need python3 has python3
    need python3-venv python3 -c 'import ensurepip'
    # torch.compile builds C++ extensions of Python.
    need g++ has g++
    need python3-dev python3 -c "$python_headers"
    ;;
mpi)
    need libcmocka-dev pkg-config --exists cmocka
    need libopenmpi-dev has mpicc
    need openmpi-bin has mpirun
    ;;
lint | fuzz | ci)
    need libcmocka-dev pkg-config --exists cmocka
    need clang has clang
    ;;
*)
    echo "setup.sh: '$purpose', expected demo, bench, check, python, mpi, lint, fuzz or ci" >&2
    exit 2
    ;;
esac
case $purpose in
fuzz | ci) need libclang-rt-14-dev fuzzer_links ;;
esac
case $purpose in
lint | ci)
    need g++ has g++
    need python3 has python3
    need clang-format has clang-format
    need clang-tidy has clang-tidy
    need cppcheck has cppcheck
    need mandoc has mandoc
    need shellcheck has shellcheck
    ;;
esac

[ -n "$missing" ] || exit 0

install="apt-get install -y --no-install-recommends$missing"
if ! has apt-get; then
    echo "setup: missing (names of the Debian packages):$missing" >&2
    echo "setup: install them, cmake in version 3.25 or later, and run this again" >&2
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "setup: missing Debian packages:$missing" >&2
    echo "setup: run this once, then the same command again:" >&2
    echo "    sudo apt-get update && sudo $install" >&2
    exit 1
fi

echo "setup: installing Debian packages:$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086 # the words of $install are its arguments
$install -qq >/dev/null
cmake_is_new || {
    echo "setup: cmake is older than 3.25 here; install a newer one" >&2
    exit 1
}
