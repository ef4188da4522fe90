#!/bin/sh
# Puts jansson, cmocka and pkgconf into .deps/ (ignored by git), for a machine that has a GPU but
# neither them nor a network: copy the tree with .deps/ there; tools/gpu_check.sh finds it.
# Uses apt-get download of this machine's Debian packages; installs nothing.
# usage: tools/carry_deps.sh
set -eu
cd "$(dirname "$0")/.."

packages='libjansson-dev libjansson4 libcmocka-dev libcmocka0 pkgconf-bin libpkgconf3'
root=$PWD/.deps
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# shellcheck disable=SC2086 # the words of $packages are its arguments
(cd "$work" && apt-get download -qq $packages)
rm -rf "$root"
mkdir -p "$root/bin" "$root/include" "$root/lib"
for package in "$work"/*.deb; do
    dpkg-deb -x "$package" "$work/all"
done
cp -R "$work"/all/usr/include/* "$root/include/"
cp "$work/all/usr/bin/pkgconf" "$root/bin/"
# Copies instead of links: not every way to carry files keeps links.
find "$work/all" \( -name 'libjansson.so*' -o -name 'libcmocka.so*' -o -name 'libpkgconf.so*' \) \
    -exec cp -L {} "$root/lib/" \;
find "$root/include" "$root/lib" | sort
