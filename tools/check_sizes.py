#!/usr/bin/env python3
"""Checks that files and functions stay small enough to read.

A file has fewer than 500 lines. A function has at most 70, in src/backend at most 150, its
signature and braces counted. Relies on the project's format: a body opens with "{" and closes
with "}" in the first column, and its signature starts in the first column too.
"""
import argparse
import re
import sys
from pathlib import Path

FOLDERS = ("include", "src", "tests", "fuzz", "bench", "examples")
SUFFIXES = (".c", ".h", ".inc", ".cu", ".cuh")
FILE_LINES_MAX = 499
FUNCTION_LINES_MAX = 70
KERNEL_LINES_MAX = 150
NAME = re.compile(r"(\w+)\s*\(")


def function_sizes(lines: list[str]) -> list[tuple[int, str, int]]:
    """(first line, name, line count) of each function."""
    found = []
    start = body = 0
    for number, line in enumerate(lines, 1):
        if line == "{" and not lines[start - 1].startswith(("namespace", "extern")):
            body = number
        elif line.startswith("}") and body:
            name = NAME.search(" ".join(lines[start - 1:body]))
            found.append((start, name.group(1) if name else "?", number - start + 1))
            body = 0
        elif not body and re.match(r"[A-Za-z_]", line) and not lines[number - 2].endswith(","):
            start = number
    return found


def file_errors(path: Path, name: str) -> list[str]:
    lines = path.read_text().splitlines()
    errors = []
    if len(lines) > FILE_LINES_MAX:
        errors.append(f"{name}: {len(lines)} lines, at most {FILE_LINES_MAX}")
    most = KERNEL_LINES_MAX if name.startswith("src/backend/") else FUNCTION_LINES_MAX
    for start, function, count in function_sizes(lines):
        if count > most:
            errors.append(f"{name}:{start}: {function} has {count} lines, at most {most}")
    return errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    root: Path = parser.parse_args().root

    files = sorted(p for f in FOLDERS for p in (root / f).rglob("*") if p.suffix in SUFFIXES)
    errors = [e for p in files for e in file_errors(p, str(p.relative_to(root)))]
    for error in errors:
        print(error)
    print(f"sizes: {len(files)} files, {len(errors)} errors")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
