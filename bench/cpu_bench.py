#!/usr/bin/env python3
"""Times the CPU kernels and, beside each row, PyTorch's CPU attention on the same shape.

Every row of `ringattn bench`, at every level that the machine has, with one and with all threads.
PyTorch is limited to the level's instructions, and measured once without a limit. Writes OUT.json
and OUT.txt when all is measured, and OUT.png if matplotlib is installed. Results are checked before
they are timed. Must not compute rates: `ringattn bench` and cpu_peer.py do.
"""
import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import cpu_report

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

# What keeps PyTorch and the libraries below it to the instructions of a level; a level that is not
# here is compared with PyTorch as it is.
LIMITS = {
    "portable": ("default", "SSE41", "SSE4_2"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512"),
    "avx512bf16": ("avx512", "AVX512_CORE_BF16", "AVX512_E3"),
}
LIMIT_NAMES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
# Some images set these, and a peer that listens to them runs at half its speed.
UNSET = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "OMP_NUM_THREADS", "MKL_NUM_THREADS", *LIMIT_NAMES)


class Failure(Exception):
    """What the user must know; ends the program with status 2 or 3."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class Peer:
    """PyTorch in a process of its own, with one limit on its instructions."""

    def __init__(self, python, level):
        self.command = [python, HERE / "cpu_peer.py"]
        self.environment = {k: v for k, v in os.environ.items() if k not in UNSET}
        if level in LIMITS:
            self.environment |= dict(zip(LIMIT_NAMES, LIMITS[level], strict=True))
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            self.command, env=self.environment, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def answer(self):
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"failed": f"the process ended with status {self.process.wait()}"}

    def ask(self, row, found):
        """Adds the results of the variants that are not found yet. False if the process ended, for
        which the variant in progress is blamed."""
        name = "PyTorch"
        try:
            self.process.stdin.write(json.dumps(row | {"skip": list(found)}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            found[name] = self.answer()
            return False
        while True:
            answer = self.answer()
            if "begin" in answer:
                name = answer["begin"]
            elif "variant" in answer:
                found[answer.pop("variant")] = answer
            elif "end" in answer:
                return True
            else:
                found[name] = answer
                return False

    def measure(self, row):
        """The fastest variant of each operation, and all of them."""
        found = {}
        while not self.ask(row, found):
            self.start()
            if "failed" in self.answer() or "PyTorch" in found:
                break
        best = {"variants": found}
        for operation in cpu_report.OPERATIONS:
            done = [{"variant": name} | variant[operation]
                    for name, variant in found.items() if operation in variant]
            if done:
                best[operation] = min(done, key=lambda timing: timing["seconds"])
        return best

    def close(self):
        self.process.kill()
        self.process.wait()


class Progress:
    """A bar on a terminal; elsewhere the rows that appear show enough."""

    def __init__(self, total):
        self.total, self.done, self.begin = total, 0, time.monotonic()
        self.terminal = sys.stderr.isatty()

    def show(self, label):
        if self.terminal:
            bar = "#" * (20 * self.done // self.total)
            elapsed = time.monotonic() - self.begin
            left = elapsed / self.done * (self.total - self.done) if self.done else 0
            left_text = f", {left / 60:.0f} min left" if self.done else ""
            print(f"\r\033[K[{bar:20}] {self.done}/{self.total}{left_text}: {label}", end="",
                  file=sys.stderr, flush=True)

    def step(self):
        self.done += 1

    def hide(self):
        if self.terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def run(command):
    """Standard output of a command that must succeed, or fail only because results are wrong."""
    try:
        done = subprocess.run(command, text=True, capture_output=True, check=False)
    except OSError as error:
        raise Failure(2, f"{command[0]}: {error.strerror}, expected the program; "
                         f"`make bench` builds it, --ringattn names it") from error
    if done.returncode not in (0, 1):
        raise Failure(done.returncode if done.returncode > 0 else 3,
                      f"{' '.join(map(str, command))}: status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def find_torch(wanted):
    """A Python that has torch, or None."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    venv = Path(os.environ.get("RINGATTN_VENV", cache / "ringattn-venv"))
    probe = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    for python in [wanted] if wanted else [sys.executable, venv / "bin" / "python"]:
        try:
            if subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode == 0:
                return str(python)
        except OSError:
            pass
    if wanted:
        raise Failure(2, f"--torch-python: {wanted}, expected a Python that has torch")
    return None


def chosen(option, text, known):
    """The items of a comma-separated list, each one of `known`."""
    items = text.split(",")
    for item in items:
        if item not in known:
            raise Failure(2, f"{option}: {item}, expected some of {','.join(known)}")
    return items


def thread_counts(text):
    every = len(os.sched_getaffinity(0))
    if not text:
        return sorted({1, every})
    try:
        counts = [int(item) for item in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise Failure(2, f"--threads: {text}, expected numbers such as 1,{every}")
    return counts


def cpu_name():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown CPU"


def write(path, text):
    """Whole or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     epilog="exit status: 0 success, 1 a wrong result, 2 bad use, "
                                            "3 a failure of the machine")
    parser.add_argument("--quick", action="store_true", help="at most 2048 positions")
    parser.add_argument("--only", action="append", metavar="TEXT",
                        help="only rows whose name contains TEXT, or another TEXT where --only is "
                             "repeated; `ringattn bench --list` names them")
    parser.add_argument("--levels", metavar="LIST", help="instruction sets (all of the machine)")
    parser.add_argument("--threads", metavar="LIST", help="numbers of threads (1 and all CPUs)")
    parser.add_argument("--no-torch", action="store_true", help="without PyTorch beside it")
    parser.add_argument("--no-unlimited", action="store_true",
                        help="without the rate of PyTorch with all instructions of the machine")
    parser.add_argument("--torch-python", metavar="PATH",
                        help="a Python that has torch (this one, or that of $RINGATTN_VENV)")
    parser.add_argument("--ringattn", metavar="PATH", default=ROOT / "build/release/ringattn")
    parser.add_argument("--out", type=Path, default=ROOT / "build/bench_cpu", metavar="OUT",
                        help="OUT.json, OUT.txt and OUT.png are written (build/bench_cpu)")
    return parser.parse_args()


def start_peers(python, levels):
    """Level -> Peer; None stands for no limit. All have loaded PyTorch before anything is timed."""
    if not python:
        return {}
    peers = {level: Peer(python, level) for level in levels}
    for level, peer in peers.items():
        peer.about = peer.answer()
        if "failed" in peer.about:
            raise Failure(3, f"{python}: PyTorch limited to {level}: {peer.about['failed']}")
    return peers


def row_names(args, select):
    every = run([args.ringattn, "bench", "--list", *select]).splitlines()
    for text in args.only or []:
        if not any(text in name for name in every):
            raise Failure(2, f"--only: {text}, expected a part of a row's name")
    return [name for name in every if not args.only or any(text in name for text in args.only)]


def measure(args, levels, threads, peers):
    """All rows; each is printed as soon as it is there."""
    select = ["--quick"] if args.quick else []
    names = row_names(args, select)
    progress = Progress(len(names) * len(threads) * (len(levels) + (None in peers)))
    print(cpu_report.HEADER)
    rows = []
    for name in names:
        for count in threads:
            group = []
            for level in levels:
                progress.show(f"{name}, {count} threads, {level}")
                row = json.loads(run([args.ringattn, "bench", "--json", "--only", name, *select,
                                      "--cpu-level", level, "--threads", str(count)]))[0]
                if level in peers:
                    row["torch"] = peers[level].measure(row)
                group.append(row)
                progress.step()
            if None in peers:
                progress.show(f"{name}, {count} threads, PyTorch without a limit")
                unlimited = peers[None].measure(group[0])
                for row in group:
                    row["torch_unlimited"] = unlimited
                progress.step()
            progress.hide()
            print("\n".join(line for row in group for line in cpu_report.row_lines(row)), flush=True)
            rows += group
    return rows


def check_out(out):
    """Found out before all is measured: the folder is there and takes files."""
    if not out.name or not out.parent.is_dir():
        raise Failure(2, f"--out: {out}, expected a name in a folder that exists")
    try:
        write(out.with_name(out.name + ".try"), "")
        out.with_name(out.name + ".try").unlink()
    except OSError as error:
        raise Failure(2, f"--out: {out}: {error.strerror}, expected a folder that takes files") from error


def bench(args):
    said = re.fullmatch(r"ringattn (\S+)\ncpu levels[^:]*:(.*)\n", run([args.ringattn, "--version"]))
    if not said:
        raise Failure(2, f"--ringattn: {args.ringattn}, expected the command line of this version")
    version, known = said[1], said[2].split()
    levels = chosen("--levels", args.levels, known) if args.levels else known
    threads = thread_counts(args.threads)
    check_out(args.out)
    python = None if args.no_torch else find_torch(args.torch_python)
    torch = "without PyTorch (--no-torch)" if args.no_torch else "without PyTorch, which is not installed"
    peers = {}
    try:
        if python:
            peers = start_peers(python, levels if args.no_unlimited else [*levels, None])
            torch = f"PyTorch {peers[levels[0]].about['torch']}"
        print(f"beside it: {torch}", file=sys.stderr)
        rows = measure(args, levels, threads, peers)
    finally:
        for peer in peers.values():
            peer.close()
    machine = {"ringattn": version, "cpu": cpu_name(), "torch": torch,
               "cpus": len(os.sched_getaffinity(0))}
    result = {"machine": machine, "quick": args.quick, "rows": rows}
    text = cpu_report.text_of(result)
    write(args.out.with_name(args.out.name + ".json"), json.dumps(result, indent=1) + "\n")
    write(args.out.with_name(args.out.name + ".txt"), text)
    print(text[text.index(cpu_report.HEADER) + len(cpu_report.HEADER):].split("\n\n", 1)[-1], end="")
    print(f"results in {args.out}.json and .txt", file=sys.stderr)
    cpu_report.draw_or_say(result, args.out.with_name(args.out.name + ".png"))
    return 0 if all(row["pass"] for row in rows) else 1


def main():
    args = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return bench(args)
    except Failure as failure:
        print(f"cpu_bench: {failure}", file=sys.stderr)
        return failure.status
    except KeyboardInterrupt:
        print("\ncpu_bench: interrupted, nothing written", file=sys.stderr)
        return 130
    except OSError as error:  # a full disk, or nobody reads what is printed
        print(f"cpu_bench: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the rest of it
        return 3


if __name__ == "__main__":
    sys.exit(main())
