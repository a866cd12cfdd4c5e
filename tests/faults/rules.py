"""When a call has to succeed, whatever happened around it.

A call has to be answered if its client stayed and

1. few things went wrong for it: the faults that struck its own requests, its preemptions, the
   times a worker was down and the times leases were let expire, while it ran, are at most `BURDEN`
   together, which is less than the router's patience (three attempts in a row that bring nothing);
2. at least one decode worker of its role and one prefill worker were there for it: not down or
   draining at all while it ran, or back within `SOON_S`;
3. none of its own requests met silence: a prefill that says nothing is never repeated. If it was a
   decode worker that fell silent, only where another replica of the role was there all the time
   and nothing happened to it;
4. nobody else's silence held what it needed: in a cluster that is short of blocks, or for a call of
   several sequences, no worker fell silent while it ran.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.faults.bench import Bench
from tests.faults.client import Outcome
from tests.mocks.mock_pair_faults import HARMLESS_FAULTS, SILENT_FAULTS, Fault
from tests.mocks.mock_pair_server import PairWorker

BURDEN = 2
SOON_S = 5.0
"""Far less than the router's queue_s."""

_BEFORE_S = 12.0
"""What happened to a worker so long before a call may still keep it from taking calls."""

Span = tuple[float, float]


@dataclass
class Happenings:
    """What was done to the workers. Times are the loop's."""

    bench: Bench
    drains: dict[str, list[Span]] = field(default_factory=dict)
    expiries: list[float] = field(default_factory=list)
    tight: bool = False

    def must_succeed(self, call: str, role: str, sequences: int, outcome: Outcome) -> bool:
        """Whether the rule above applies to this call."""
        span = (outcome.started_at, outcome.ended_at)
        own = [fault for fault in self._faults(self.bench.workers) if fault.call == call]
        kills = [fault for fault in own if "kill" in fault.kind]
        harmful = [f for f in own if f.kind not in HARMLESS_FAULTS and f not in kills]
        downs = [down for w in self.bench.workers for down in w.downs if _meet(down, span)]
        expiries = [at for at in self.expiries if span[0] <= at <= span[1]]
        preempted = self.bench.cluster.preempted[call]
        if outcome.left or len(harmful) + len(downs) + len(expiries) + preempted > BURDEN:
            return False
        decode = [w for w in self.bench.decode.values() if w.role == role]
        prefill: Sequence[PairWorker] = self.bench.prefill
        if not any(self._there(w, span) for w in decode):
            return False
        if not all(self._there(w, span) for w in prefill):
            return False
        silent = [fault for fault in own if fault.kind in SILENT_FAULTS]
        if any(fault.kind != "hang" for fault in silent):
            return False
        if silent and sum(self._untouched(w, span) for w in decode) < 1:
            return False
        others = [f for f in self._faults(self.bench.workers) if f.kind in SILENT_FAULTS]
        held = any(_meet((f.fired_at or 0, float("inf")), span) for f in others)
        return not (held and (self.tight or sequences > 1))

    def _faults(self, workers: Sequence[PairWorker]) -> list[Fault]:
        return [f for w in workers for f in w.plan.faults if f.fired_at is not None]

    def _there(self, worker: PairWorker, span: Span) -> bool:
        away = [*worker.downs, *self.drains.get(worker.id, [])]
        return all(end - start <= SOON_S for start, end in away if _meet((start, end), span))

    def _untouched(self, worker: PairWorker, span: Span) -> bool:
        wide = (span[0] - _BEFORE_S, span[1])
        away = [*worker.downs, *self.drains.get(worker.id, [])]
        struck = [f for f in self._faults([worker]) if f.kind not in HARMLESS_FAULTS]
        return not any(_meet(each, wide) for each in away) and not any(
            wide[0] <= (f.fired_at or 0) <= wide[1] for f in struck
        )


def _meet(one: Span, other: Span) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]
