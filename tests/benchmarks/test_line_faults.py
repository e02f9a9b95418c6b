"""Check the faults that `line_faults.py` makes, and the lines that `code_size.py` counts."""

import ast

from benchmarks.versions import code_size, line_mutations

SOURCE = '''"""A module with 3 lines."""
import logging


class Scale:
    def apply(self, rows: list[3], scale=1):
        """Return 2 rows."""
        if scale > 0 and rows:
            raise ValueError("no" + str(4))
        logging.info("%d rows", 5)
        self.check(rows, True)  # é

        return f"{6}" + self.name
'''


def test_faults_change_only_executed_code(tmp_path):
    (name, function) = next(line_mutations.iterate_functions(ast.parse(SOURCE)))
    lines = SOURCE.encode().splitlines()
    faults = set()
    for number, begin, end, new, _ in line_mutations.iterate_mutations(function, lines):
        line = lines[number - 1]
        faults.add((line[:begin] + new.encode() + line[end:]).decode().strip())
        ast.parse(b"\n".join([*lines[: number - 1], line[:begin] + new.encode() + line[end:], *lines[number:]]))
    assert name == "Scale.apply" and faults == {
        "if scale >= 0 and rows:",
        "if scale <= 0 and rows:",
        "if scale > 0 or rows:",
        "if not (scale > 0 and rows):",
        "if scale > 1 and rows:",
        "pass  # é",
        "self.check(True, rows)  # é",
        "self.check(rows, False)  # é",
        "return None",
    }


def test_lines_are_located_in_a_changed_file(tmp_path):
    (tmp_path / line_mutations.PACKAGE / "hub").mkdir(parents=True)
    (tmp_path / line_mutations.PACKAGE / "hub/moved.py").write_text(f"x = 1\n\n{SOURCE}", encoding="utf-8")
    result = line_mutations.make_line_index(tmp_path)["Scale.apply", "self.check(rows, True)  # é"]
    assert result == [(f"{line_mutations.PACKAGE}/hub/moved.py", 13, 13)]


def test_comments_docstrings_and_blank_lines_are_not_code():
    counts = code_size.count_text(SOURCE)
    assert (counts["code_lines"], counts["functions"], counts["complexity"]) == (8, 1, 3)
