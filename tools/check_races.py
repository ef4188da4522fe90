#!/usr/bin/env python3
"""Compares what racecheck names with the pairs that are proven to be no races.

Reads reports of `compute-sanitizer --tool racecheck --print-limit 0` on programs that were built
with -lineinfo from this tree, and a list with one pair of places a line:

    write fold_512_score.cuh:send_factors  read fold_512_output.cuh:factors  proofs 1 2

A place is a file and the function that its line stands in, so that a list outlives edits elsewhere;
the numbers are proofs in docs/kernels.md, "What racecheck names". Fails on a pair that is not
listed, which is printed as reported, and on a report that it does not understand or that is cut
off. A listed pair that no report names is said aloud: racecheck sees what a run happens to do, but
a pair that never comes again has no place in the list.
"""
import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests/gpu/known_races.txt"
SOURCES = ("src/backend/cuda", "tests/gpu")
ENTRY = re.compile(r"(read|write) (\S+:\w+) +(read|write) (\S+:\w+) +proofs((?: \d+)+)")
HAZARD = re.compile(r"(?:Error|Warning|Info): Race reported between (Read|Write) access at (.*)")
OTHER = re.compile(r"    and (Read|Write) access at (.*?)(?: \[(\d+) hazards?\])?")
LINE = re.compile(r" in (?:\S*/)?([\w.]+):(\d+)$")
SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")
DEFINITION = re.compile(r"\b(?:RA_PTX|__device__|__global__)\b")
NAME = re.compile(r"\b(?!__launch_bounds__)(\w+)\(")


class Place(NamedTuple):
    """A function that reads or writes."""
    access: str
    where: str

    def __str__(self) -> str:
        return f"{self.access} {self.where}"


Pair = frozenset[Place]


def show(pair: Pair) -> str:
    places = sorted(pair, reverse=True)  # what is written first
    return "  ".join(str(place) for place in (places * 2)[:2])


def function_at(lines: list[str], number: int) -> str:
    """The last function whose definition begins at or before a line."""
    for line in reversed(lines[:number]):
        if DEFINITION.search(line) and (name := NAME.search(line)):
            return name.group(1)
    return "?"


def place_of(access: str, text: str) -> Place:
    """`?` in a place's stead where the report has no line of ours: such a pair is in no list."""
    if match := LINE.search(text):
        name, number = match.group(1), int(match.group(2))
        for folder in SOURCES:
            path = ROOT / folder / name
            if path.exists():
                return Place(access, f"{name}:{function_at(path.read_text().splitlines(), number)}")
    return Place(access, "?")


def read_list(text: str) -> dict[Pair, list[int]]:
    """The proofs of each pair."""
    known = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        match = ENTRY.fullmatch(line)
        if not match:
            raise SystemExit(f"line {number} of the list: {line}")
        pair = frozenset({Place(match[1], match[2]), Place(match[3], match[4])})
        known[pair] = [int(proof) for proof in match[5].split()]
    return known


def read_report(text: str) -> tuple[list[tuple[Pair, str]], str]:
    """Pairs with their lines of the report, and what is wrong with it: one or more pairs share the
    place that is named first."""
    pairs, hazards, first = [], 0, None
    shown = None
    for line in text.splitlines():
        said = line.removeprefix("=========").removeprefix(" ")
        if match := HAZARD.fullmatch(said):
            first, head = place_of(match[1].lower(), match[2]), said
            hazards += 1
        elif first and (match := OTHER.fullmatch(said)):
            pairs.append((frozenset({first, place_of(match[1].lower(), match[2])}),
                          f"{head}\n{said}"))
        elif match := SUMMARY.search(said):
            shown = int(match[1])
    if shown is None:
        return pairs, "it has no summary: racecheck did not come to its end"
    if shown != hazards or len(pairs) < hazards:
        return pairs, f"it shows {shown} hazards, of which {hazards} were understood"
    return pairs, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--list", type=Path, default=LIST, help="known pairs (%(default)s)")
    arguments = parser.parse_args()

    known = read_list(arguments.list.read_text())
    seen, unknown, errors = set(), {}, 0
    for path in arguments.reports:
        pairs, error = read_report(path.read_text(errors="replace"))
        if error:
            print(f"{path}: {error}")
            errors += 1
        for pair, said in pairs:
            if pair in known:
                seen.add(pair)
            else:
                unknown.setdefault(pair, said)
    for pair, said in unknown.items():
        print(f"not listed: {show(pair)}\n{said}")
    for pair in known.keys() - seen:
        print(f"listed, not seen: {show(pair)}")
    print(f"{len(seen)} of {len(known)} listed pairs seen, {len(unknown)} others, "
          f"{errors} of {len(arguments.reports)} reports not understood")
    return 1 if unknown or errors else 0


if __name__ == "__main__":
    sys.exit(main())
