"""tools/check_races.py on reports as compute-sanitizer writes them, about the sources of this tree.

Lines of the sources are found by what stands in them, so that edits there leave this test alone.
"""
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CUDA = ROOT / "src/backend/cuda"
PROOF = re.compile(r"^(\d+)\. ", re.MULTILINE)
LIST = """# a comment

write fold_512_score.cuh:send_factors  read fold_512_output.cuh:factors  proofs 1 2
write fold_512_score.cuh:emit  read fold_512_output.cuh:fold  proofs 1
"""


def at(name: str, text: str) -> str:
    """A place as the report ends it: the first line of a file with this text."""
    lines = (CUDA / name).read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if text in line)
    return f"in {name}:{number}"


WRITE = "Write access at softmax_inverse(float)+0x1cbc0 " + at("fold_512_score.cuh", "to[8] = f1")
READ = ("Read access at fold512::output_role<__half, (int)2>::factors() const+0xdf0 "
        + at("fold_512_output.cuh", "make_float2(from[0], from[8])"))
SECOND = ("Write access at fold512::score_role<__half, (int)2>::emit(float (&)[64], int)+0x16560 "
          + at("fold_512_score.cuh", "stmatrix_x4("))
KNOWN = f"""========= COMPUTE-SANITIZER
seed 1
[ RUN      ] test_edges
========= Error: Race reported between {READ}
=========     and {WRITE} [224 hazards]
=========     and {WRITE} [1 hazard]
=========
[       OK ] test_edges
"""
UNKNOWN = f"""========= Error: Race reported between {READ}
=========     and {SECOND} [16 hazards]
=========
"""


def summary(count: int) -> str:
    return f"========= RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)\n"


class CheckRaces(unittest.TestCase):
    def run_on(self, *reports: str, known: str = LIST) -> tuple[int, str]:
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / f"report{i}" for i in range(len(reports))]
            for path, text in zip(paths, reports):
                path.write_text(text)
            (Path(folder) / "known").write_text(known)
            done = subprocess.run([sys.executable, ROOT / "tools/check_races.py", "--list",
                                   f"{folder}/known", *paths], capture_output=True, text=True)
            return done.returncode, done.stdout + done.stderr

    def test_known_pair_passes_and_the_other_is_said(self):
        status, said = self.run_on(KNOWN + summary(1))
        self.assertEqual(status, 0, said)
        self.assertIn("listed, not seen: write fold_512_score.cuh:emit  "
                      "read fold_512_output.cuh:fold\n", said)
        self.assertIn("1 of 2 listed pairs seen, 0 others, 0 of 1 reports not understood", said)

    def test_unknown_pair_fails_with_its_text(self):
        status, said = self.run_on(KNOWN + UNKNOWN + summary(2))
        self.assertEqual(status, 1, said)
        self.assertIn("not listed: write fold_512_score.cuh:emit  "
                      "read fold_512_output.cuh:factors\n", said)
        self.assertIn(SECOND + " [16 hazards]", said)

    def test_reads_and_writes_differ(self):
        swapped = KNOWN.replace("Write access", "Read access")
        self.assertEqual(self.run_on(swapped + summary(1))[0], 1)

    def test_both_reports_count(self):
        status, said = self.run_on(KNOWN + summary(1), UNKNOWN + summary(1))
        self.assertEqual(status, 1, said)
        self.assertIn("1 of 2 listed pairs seen, 1 others", said)

    def test_a_place_without_a_line_is_in_no_list(self):
        status, said = self.run_on(re.sub(r" in \S+:\d+", "", KNOWN) + summary(1))
        self.assertEqual(status, 1, said)
        self.assertIn("not listed: write ?  read ?", said)

    def test_what_is_not_understood_fails(self):
        for report in (KNOWN, KNOWN + summary(2), KNOWN.replace("Race", "Hazard") + summary(1),
                       KNOWN.replace("    and", "with") + summary(1), ""):
            status, said = self.run_on(report)
            self.assertEqual(status, 1, said)
            self.assertIn("1 of 1 reports not understood", said)

    def test_no_hazard_passes(self):
        self.assertEqual(self.run_on(summary(0))[0], 0)

    def test_a_line_of_the_list_that_is_no_pair(self):
        status, said = self.run_on(summary(0), known=LIST.replace("proofs 1\n", "proofs\n"))
        self.assertEqual(status, 1)
        self.assertIn("line 4 of the list", said)

    def test_the_list_names_functions_and_proofs_that_there_are(self):
        page = (ROOT / "docs/kernels.md").read_text().split("\n## What racecheck names\n")[1]
        proofs = set(PROOF.findall(page.split("\n## ")[0]))
        lines = [line for line in (ROOT / "tests/gpu/known_races.txt").read_text().splitlines()
                 if line and not line.startswith("#")]
        self.assertTrue(lines)
        for line in lines:
            for name, function in re.findall(r"([\w.]+):(\w+)", line):
                self.assertRegex((CUDA / name).read_text(), rf"\b{function}\(", line)
            self.assertLessEqual(set(line.split("proofs ")[1].split()), proofs, line)


if __name__ == "__main__":
    unittest.main()
