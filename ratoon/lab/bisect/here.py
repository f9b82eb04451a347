# Owns: running and descending in this process, its planted fault included.
# Promises: what was planted is gone afterwards.
# Never: survives a case that kills its process (child.py does).
"""The worker of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ratoon.lab.bisect import trial
from ratoon.lab.bisect.case import Case
from ratoon.lab.bisect.descend import audit, opened, side_by_side
from ratoon.lab.bisect.outcome import Difference, Outcome
from ratoon.lab.faults import planted
from ratoon.runtime.engine import Engine


@dataclass(frozen=True)
class Here:
    """open_engine: where the engine of a case comes from."""

    open_engine: Callable[[Case], Engine] = opened

    def run(self, case: Case) -> Outcome:
        return trial.run(case, self.open_engine)

    def descend(self, case: Case, healed: Case | None) -> Difference | None:
        """The culprit by the healed configuration, else by the dense reference."""
        with planted(case.plant):
            found = side_by_side(case, healed, self.open_engine) if healed else None
            return found or audit(case, self.open_engine)
