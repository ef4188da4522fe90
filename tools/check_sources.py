#!/usr/bin/env python3
"""Checks that the lists of cmake/ name each C and CUDA file of src once, and no other file; src/cli/main.c stands with its executable."""
import argparse
import re
import sys
from pathlib import Path

LISTS = ("sources.cmake", "cuda.cmake", "mpi.cmake")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    root: Path = parser.parse_args().root

    text = "".join((root / "cmake" / name).read_text() for name in LISTS)
    code = "\n".join(line.split("#")[0] for line in text.splitlines())
    listed = re.findall(r"src/[\w/]+\.cu?\b", code)
    present = {str(p.relative_to(root)) for p in (root / "src").rglob("*.c*")
               if p.suffix in (".c", ".cu")}
    present.discard("src/cli/main.c")
    errors = ([f"{name}: in no list of cmake/" for name in sorted(present - set(listed))] +
              [f"{name}: listed, but there is no such file" for name in sorted(set(listed) - present)] +
              [f"{name}: listed twice" for name in sorted(set(listed)) if listed.count(name) > 1])
    for error in errors:
        print(error)
    print(f"sources: {len(listed)} listed, {len(errors)} errors")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
