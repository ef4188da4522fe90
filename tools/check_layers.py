#!/usr/bin/env python3
"""Checks that every file of src includes only its own or lower folders, and that headers form no cycle.

src/LAYERS lists the folders, lowest first. Project includes are written from src
("plan/cover.h"), so the first part of the path is the layer.
"""
import argparse
import re
import sys
from pathlib import Path

SUFFIXES = (".c", ".h", ".inc", ".cu", ".cuh")
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def read_includes(src: Path) -> dict[str, list[str]]:
    """Maps each file of src, named from src, to the names that it includes in quotes."""
    files = sorted(p for p in src.rglob("*") if p.suffix in SUFFIXES)
    return {str(p.relative_to(src)): INCLUDE.findall(p.read_text()) for p in files}


def layer_errors(includes: dict[str, list[str]], layers: list[str], public: set[str]) -> list[str]:
    """One line for each include that goes up, leaves src or names no file."""
    errors = []
    for name, targets in includes.items():
        layer = name.split("/")[0]
        if layer not in layers:
            errors.append(f"src/{name}: folder '{layer}' is not in src/LAYERS")
            continue
        for target in targets:
            if target in public:
                continue
            if target not in includes:
                errors.append(f'src/{name}: "{target}" is no file of src; write it from src')
            elif layers.index(target.split("/")[0]) > layers.index(layer):
                errors.append(f'src/{name}: "{target}" is of a higher layer')
    return errors


def find_cycle(includes: dict[str, list[str]]) -> list[str]:
    """The files of one include cycle, or nothing."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name):] + [name]
        if name in done:
            return []
        for target in includes.get(name, []):
            cycle = visit(target, path + [name])
            if cycle:
                return cycle
        done.add(name)
        return []

    for name in includes:
        cycle = visit(name, [])
        if cycle:
            return cycle
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    src = parser.parse_args().root / "src"

    layers = (src / "LAYERS").read_text().split()
    includes = read_includes(src)
    public = {p.name for p in (src.parent / "include").glob("*.h")}
    errors = layer_errors(includes, layers, public)
    cycle = find_cycle(includes)
    if cycle:
        errors.append("include cycle: " + " -> ".join(cycle))
    for error in errors:
        print(error)
    print(f"layers: {len(includes)} files in {len(layers)} folders, {len(errors)} errors")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
