#!/usr/bin/env bash
# Installs a build into a temporary prefix, moves that prefix, and builds and runs consumer.c
# against it with pkg-config (shared and static) and with find_package (shared and static).
# usage: run.sh BUILD_DIR [CMAKE [CC]]
set -euo pipefail

build=$1
cmake=${2:-cmake}
cc=${3:-cc}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$cmake" --install "$build" --prefix "$work/first" >"$work/install.log"
# A tree that works only where it was installed would pass without this move.
mv "$work/first" "$work/prefix"
prefix=$work/prefix

# The same tree without the shared library leaves pkg-config's user only the static one.
cp -R "$prefix" "$work/static"
find "$work/static" -name 'libringattn.so*' -delete

library=$(dirname "$(find "$prefix" -name libringattn.so | head -n 1)")
relative=${library#"$prefix"/}

read -ra flags <<<"$(PKG_CONFIG_PATH=$library/pkgconfig pkg-config --cflags --libs ringattn)"
"$cc" -std=c17 "$here/consumer.c" -o "$work/pkg_shared" "${flags[@]}" -lm
read -ra flags <<<"$(PKG_CONFIG_PATH=$work/static/$relative/pkgconfig \
    pkg-config --static --cflags --libs ringattn)"
"$cc" -std=c17 "$here/consumer.c" -o "$work/pkg_static" "${flags[@]}"

"$cmake" -S "$here" -B "$work/build" -DCMAKE_C_COMPILER="$cc" -DCMAKE_PREFIX_PATH="$prefix" \
    >"$work/configure.log"
"$cmake" --build "$work/build" >"$work/build.log"

LD_LIBRARY_PATH=$library "$work/pkg_shared"
"$work/pkg_static"
"$work/build/consumer_shared"
"$work/build/consumer_static"
"$prefix"/bin/ringattn --version
