#!/usr/bin/env python3
"""Checks that cmake/sources.cmake lists exactly the C files of src, apart from src/cli/main.c."""
import argparse
import re
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    root: Path = parser.parse_args().root

    text = (root / "cmake/sources.cmake").read_text()
    code = "\n".join(line.split("#")[0] for line in text.splitlines())
    listed = re.findall(r"src/[\w/]+\.c\b", code)
    present = {str(p.relative_to(root)) for p in (root / "src").rglob("*.c")}
    present.discard("src/cli/main.c")
    errors = ([f"{name}: not in cmake/sources.cmake" for name in sorted(present - set(listed))] +
              [f"{name}: listed, but there is no such file" for name in sorted(set(listed) - present)] +
              [f"{name}: listed twice" for name in sorted(set(listed)) if listed.count(name) > 1])
    for error in errors:
        print(error)
    print(f"sources: {len(listed)} listed, {len(errors)} errors")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
