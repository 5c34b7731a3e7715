"""The result of each test of a suite, and how a suite is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List

PASSED, FAILED, SKIPPED, EXCLUDED = "passed", "failed", "skipped", "excluded"


@dataclass
class Outcome:
    """One test. `reason`: why it is excluded or skipped, or the traceback of its failure."""

    test: str  # the id inside its file: "Class::test_name[parameters]"
    result: str
    reason: str = ""


Suite = Dict[str, List[Outcome]]  # the key is the file: the row of the table


@dataclass
class RunOptions:
    """What is run: `only` selects files by a part of the name, `keyword` tests as `pytest -k`."""

    jobs: int = 2
    limit_s: float = 1800.0  # of one file
    only: str = ""
    keyword: str = ""

    @property
    def whole(self) -> bool:
        return not self.only and not self.keyword
