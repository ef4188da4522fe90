#!/usr/bin/env python3
"""Checks that the shared library exports exactly what include/ringattn.h declares.

Compares three lists of names: RA_API functions of the header, lines of src/ringattn.map, and
defined dynamic symbols of the library.
"""
import argparse
import re
import subprocess
import sys
from pathlib import Path

COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
FUNCTION = re.compile(r"\bRA_API\b[^;{}]*?\b(ra_\w+)\s*\(")


def declared_names(header: Path) -> set[str]:
    return set(FUNCTION.findall(COMMENT.sub(" ", header.read_text())))


def mapped_names(version_script: Path) -> set[str]:
    return set(re.findall(r"^\s+(ra_\w+);", version_script.read_text(), re.MULTILINE))


def exported_names(library: Path) -> set[str]:
    """Defined dynamic symbols, but for the version node itself (type A)."""
    lines = subprocess.run(["nm", "-D", "--defined-only", str(library)], check=True,
                           capture_output=True, text=True).stdout.splitlines()
    fields = [line.split() for line in lines]
    return {f[-1].split("@")[0] for f in fields if len(f) >= 2 and f[-2] != "A"}


def differences(left: set[str], right: set[str], left_text: str, right_text: str) -> list[str]:
    return ([f"{name}: {left_text}, not {right_text}" for name in sorted(left - right)] +
            [f"{name}: {right_text}, not {left_text}" for name in sorted(right - left)])


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path, help="libringattn.so of a build")
    parser.add_argument("--root", type=Path, default=root)
    arguments = parser.parse_args()

    declared = declared_names(arguments.root / "include/ringattn.h")
    mapped = mapped_names(arguments.root / "src/ringattn.map")
    exported = exported_names(arguments.library)
    errors = (differences(declared, mapped, "declared in ringattn.h", "listed in ringattn.map") +
              differences(declared, exported, "declared in ringattn.h", "exported"))
    if not declared:
        errors.append("no declared function was found")
    for error in errors:
        print(error)
    print(f"exports: {len(declared)} declared, {len(exported)} exported, {len(errors)} errors")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
