#!/usr/bin/env python3
"""Turns the JSON of cpu_bench.py into a table and, where matplotlib is installed, a plot.

As a program: `cpu_report.py build/bench_cpu.json` prints the table and draws build/bench_cpu.png;
with --markdown it prints the table of docs/kernels.md, of one result or of several together. Must
not measure anything.
"""
import argparse
import json
import os
import sys
from pathlib import Path

OPERATIONS = ("forward", "backward")
HEADER = (f"{'':30} {'threads':>7} {'level':10} {'':8} {'GFLOP/s':>8} {'of peak':>7} "
          f"{'torch':>7} {'times':>6} {'any set':>7}")
LEGEND = """\
of peak: share of the multiply-add peak of the level and threads, measured before and after
torch:   PyTorch's fastest way, limited to the level's instructions; times: how many times faster
any set: PyTorch with every instruction that the machine has; last: the way that was fastest
GFLOP/s count allowed pairs only, 4 head_dim a pair forward and 10 backward"""


def rate(row, peer, operation):
    """GFLOP/s of "torch" or "torch_unlimited", None if it has none."""
    return row.get(peer, {}).get(operation, {}).get("gflops")


def row_lines(row):
    """The lines of the table for one row: forward and backward."""
    begin = f"{row['name']:30} {row['threads']:7} {row['level']:10}"
    if not row["pass"]:
        return [f"{begin} WRONG: error {row['error_share']} times what rounding explains; not timed"]
    lines = []
    for operation in OPERATIONS:
        ours, torch = row[operation], rate(row, "torch", operation)
        unlimited = rate(row, "torch_unlimited", operation)
        line = f"{begin} {operation:8} {ours['gflops']:8.1f} {ours['ratio']:7.3f}"
        line += f" {torch:7.1f} {ours['gflops'] / torch:6.2f}" if torch else f" {'-':>7} {'-':>6}"
        line += f" {unlimited:7.1f}" if unlimited else f" {'-':>7}"
        lines.append(f"{line}  {row['torch'][operation]['variant']}" if torch else line)
    return lines


def failures(row):
    """What went wrong with PyTorch's variants, which a reader of the table must know."""
    found = []
    for peer in ("torch", "torch_unlimited"):
        found += [f"{peer}, {name}: {variant['failed']}"
                  for name, variant in row.get(peer, {}).get("variants", {}).items()
                  if "failed" in variant]
    return found


def scaling_lines(rows):
    """How many times faster more threads are than one."""
    base = {(r["name"], r["level"]): r for r in rows if r["threads"] == 1 and r["pass"]}
    lines = []
    for row in rows:
        one = base.get((row["name"], row["level"]))
        if one and row["pass"] and row["threads"] > 1:
            times = [f"{o} {one[o]['seconds'] / row[o]['seconds']:.2f}" for o in OPERATIONS]
            lines.append(f"{row['name']:30} {row['threads']:7} {row['level']:10} {', '.join(times)}")
    return lines


def text_of(result):
    """The whole report."""
    rows = result["rows"]
    machine = result["machine"]
    lines = [f"ringattn {machine['ringattn']}, {machine['cpu']}, {machine['cpus']} CPUs used; "
             f"{machine['torch']}", "", HEADER]
    for row in rows:
        lines += row_lines(row)
    scaling = scaling_lines(rows)
    if scaling:
        lines += ["", "more threads over one:", *scaling]
    wrong = sorted({line for row in rows for line in failures(row)})
    if wrong:
        lines += ["", "PyTorch, not counted:", *wrong]
    return "\n".join([*lines, "", LEGEND]) + "\n"


def markdown_of(results):
    """A Markdown table with one line a row, both operations beside each other."""
    lines = ["| shape | level | threads | forward GFLOP/s | of peak | PyTorch | times | any set "
             "| backward GFLOP/s | of peak | PyTorch | times | any set |",
             "| --- " * 13 + "|"]
    for row in (row for result in results for row in result["rows"] if row["pass"]):
        line = f"| {row['name']} | {row['level']} | {row['threads']} |"
        for operation in OPERATIONS:
            ours, torch = row[operation], rate(row, "torch", operation)
            unlimited = rate(row, "torch_unlimited", operation)
            line += f" {ours['gflops']:.0f} | {ours['ratio']:.2f} |"
            line += f" {torch:.0f} | {ours['gflops'] / torch:.1f} |" if torch else " | |"
            line += f" {unlimited:.0f} |" if unlimited else " |"
        lines.append(line)
    return "\n".join(lines) + "\n"


def draw(result, path):
    """A panel for every level and number of threads: rates as bars, the peak as a mark."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [r for r in result["rows"] if r["pass"]]
    levels = list(dict.fromkeys(r["level"] for r in rows))
    threads = sorted({r["threads"] for r in rows})
    figure, panels = pyplot.subplots(len(levels), len(threads), squeeze=False, sharex="col",
                                     figsize=(7 * len(threads), 4 * len(levels)))
    for i, level in enumerate(levels):
        for j, count in enumerate(threads):
            panel = panels[i][j]
            bars = [(r, o) for r in rows if (r["level"], r["threads"]) == (level, count)
                    for o in OPERATIONS]
            place = range(len(bars))
            panel.barh(place, [r[o]["gflops"] for r, o in bars], 0.4, label="ringattn")
            panel.barh([y + 0.4 for y in place], [rate(r, "torch", o) or 0 for r, o in bars], 0.4,
                       label="PyTorch, same instructions")
            peaks = [r[o]["gflops"] / r[o]["ratio"] for r, o in bars]
            panel.plot(peaks, [y + 0.2 for y in place], "k|", markersize=10, label="peak")
            panel.set_yticks([y + 0.2 for y in place], [f"{r['name']} {o}" for r, o in bars],
                             fontsize=7)
            panel.invert_yaxis()
            panel.set_title(f"{level}, {count} thread{'s' if count > 1 else ''}")
            panel.set_xlabel("GFLOP/s, allowed pairs")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    part = path.with_name(path.stem + ".part.png")
    try:
        figure.savefig(part, dpi=110)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def draw_or_say(result, path):
    """Draws if that is possible, and says what it did."""
    try:
        draw(result, path)
    except ImportError as error:
        print(f"no plot: {error}; cpu_report.py draws it later, with a Python that has matplotlib",
              file=sys.stderr)
    else:
        print(f"plot in {path}", file=sys.stderr)


def load(path):
    """A result and its text, which also shows that it is one."""
    result = json.loads(path.read_text())
    return result, text_of(result)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path, nargs="+", help="files that cpu_bench.py wrote")
    parser.add_argument("--markdown", action="store_true", help="one Markdown table, no plot")
    args = parser.parse_args()
    results = []
    for path in args.json:
        try:
            results.append(load(path))
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"cpu_report: {path}: {error!r}, expected a file that cpu_bench.py wrote",
                  file=sys.stderr)
            return 2
    if args.markdown:
        print(markdown_of([result for result, _ in results]), end="")
        return 0
    for path, (result, text) in zip(args.json, results, strict=True):
        print(text, end="")
        draw_or_say(result, path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
