#!/usr/bin/env python3
"""Prints a table of the lines that the tests ran, from a build of the coverage preset.

Asks gcov for every .gcda file of the build folder and adds up the counts of each source file.
"""
import argparse
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path


def read_counts(build: Path, src: Path) -> dict[str, dict[int, int]]:
    """Times that each executable line of each file below src ran."""
    counts: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for data in sorted(build.rglob("*.gcda")):
        output = subprocess.run(["gcov", "--json-format", "--stdout", str(data)], check=True,
                                capture_output=True, text=True, cwd=build).stdout
        for report in filter(None, output.splitlines()):
            for file in json.loads(report)["files"]:
                path = Path(file["file"])
                if src not in path.parents:
                    continue
                name = str(path.relative_to(src))
                for line in file["lines"]:
                    counts[name][line["line_number"]] += line["count"]
    return counts


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=root / "build/coverage")
    parser.add_argument("--missed", action="store_true", help="also list the lines that never ran")
    arguments = parser.parse_args()

    counts = read_counts(arguments.build.resolve(), root / "src")
    all_lines = all_run = 0
    for name, lines in sorted(counts.items()):
        run = sum(1 for count in lines.values() if count)
        all_lines += len(lines)
        all_run += run
        print(f"{name:40} {run:5} of {len(lines):5} {100 * run / len(lines):6.1f} %")
        if arguments.missed:
            print("    missed:", *sorted(n for n, count in lines.items() if not count))
    if not all_lines:
        print("coverage: no data; run the tests of the coverage preset first", file=sys.stderr)
        return 1
    print(f"{'total':40} {all_run:5} of {all_lines:5} {100 * all_run / all_lines:6.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
