#!/usr/bin/env python3
"""Compiles the tuned kernels for Hopper and checks what ptxas says of them.

No spills, no stack, and no warning of the C75xx and C76xx families: they mean that matrix
instructions were serialised or that registers ran short, which is slow, not wrong, so that no test
would notice. Takes the sources from RA_CUDA_TUNED_SOURCES of cmake/cuda.cmake, or reads a log of
`nvcc -Xptxas -v` if one is given.
"""
import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = re.compile(r"set\(RA_CUDA_TUNED_SOURCES\s+(.*?)\)", re.DOTALL)
ENTRY = re.compile(r"(?:Compiling entry function|Function properties for) '?([\w$.]+)'?")
USAGE = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
WARNING = re.compile(r"\bC7[56]\d\d\b.*")
NVCC = ["-std=c++17", "-O3", "-gencode", "arch=compute_90a,code=sm_90a", "-diag-suppress", "20014",
        "-Xptxas", "-v", "-cubin"]


def tuned_sources() -> list[str]:
    found = SOURCES.search((ROOT / "cmake/cuda.cmake").read_text())
    return [name for name in found.group(1).split() if name.endswith(".cu")] if found else []


def compile_log(nvcc: str, source: str) -> str:
    """What nvcc prints; a failure to compile is an error of its own."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([nvcc, *NVCC, f"-I{ROOT}/include", f"-I{ROOT}/src", "-o",
                               f"{folder}/out.cubin", str(ROOT / source)],
                              capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{source}: does not compile\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def log_errors(name: str, log: str) -> tuple[int, list[str]]:
    """Number of kernels in the log, and what is wrong with them."""
    kernels, errors, entry = 0, [], "?"
    for line in log.splitlines():
        if match := ENTRY.search(line):
            entry = match.group(1)
        if match := USAGE.search(line):
            kernels += 1
            if any(int(number) for number in match.groups()):
                errors.append(f"{name}: {entry}: {match.group(0)}")
        if match := WARNING.search(line):
            errors.append(f"{name}: {match.group(0).strip()}")
    return kernels, errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="*", type=Path, help="logs to read instead of compiling")
    arguments = parser.parse_args()

    if arguments.logs:
        logs = {str(path): path.read_text() for path in arguments.logs}
    else:
        nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
        if not nvcc:
            print("skip  ptxas: no nvcc on this machine")
            return 0
        sources = tuned_sources()
        with ThreadPoolExecutor() as pool:
            logs = dict(zip(sources, pool.map(lambda s: compile_log(nvcc, s), sources)))

    total, errors = 0, []
    for name, log in logs.items():
        kernels, found = log_errors(name, log)
        total += kernels
        errors += found
    for error in errors:
        print(error)
    print(f"{total} kernels in {len(logs)} files, {len(errors)} complaints")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
