"""Checks that accesses of a GPU's streams and the host to the same memory have an order.

Every lane (a stream, or a thread of the host) counts its operations; a vector clock says how many
of each other lane's an operation comes behind. Two operations that overlap in memory, one of which
writes, and neither of which comes behind the other, are a race.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field

from memory_ranges import EMPTY, Ranges

Clock = dict[int, int]  # by lane: operations that are done


class Race(AssertionError):
    """Two operations without an order use the same memory."""


@dataclass(eq=False)
class Lane:
    """A stream or a thread."""

    name: str
    clock: Clock = field(default_factory=dict)

    def after(self, clock: Clock) -> None:
        """What follows in this lane comes behind ``clock``."""
        for lane, n in clock.items():
            if n > self.clock.get(lane, 0):
                self.clock[lane] = n


@dataclass(frozen=True, eq=False)
class Operation:
    """What one launch, copy or piece of host work did, in the order in which all were recorded."""

    name: str
    lane: Lane
    number: int  # in its lane, from 1 on
    behind: Clock  # of the lanes, itself left out
    reads: Ranges
    writes: Ranges

    def follows(self, other: Operation) -> bool:
        return self.behind.get(id(other.lane), 0) >= other.number


class StreamOrder:
    """The operations so far; ``record`` raises a Race as soon as there is one."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._of_lane: dict[int, list[Operation]] = defaultdict(list)
        self._lock = threading.RLock()  # again in a thread whose garbage is given back

    def record(
        self, name: str, lane: Lane, reads: Ranges = EMPTY, writes: Ranges = EMPTY
    ) -> Operation:
        """Adds an operation, which comes behind all that its lane does."""
        with self._lock:
            new = self.check(name, lane, reads, writes)
            lane.clock[id(lane)] = new.number
            self.operations.append(new)
            self._of_lane[id(lane)].append(new)
        return new

    def check(self, name: str, lane: Lane, reads: Ranges, writes: Ranges) -> Operation:
        """The operation as ``record`` would add it; a Race if it has no order with others."""
        number = lane.clock.get(id(lane), 0) + 1
        new = Operation(name, lane, number, dict(lane.clock), reads, writes)
        with self._lock:
            lanes = list(self._of_lane.items())
        for key, earlier in lanes:
            if key == id(lane):
                continue
            for old in reversed(earlier):
                if new.follows(old):
                    break  # and all that it comes behind
                if writes.meets(old.writes) or writes.meets(old.reads) or reads.meets(old.writes):
                    raise Race(
                        f"{old.name} ({old.lane.name}) and {name} ({lane.name}) use the same "
                        "memory, and nothing orders them"
                    )
        return new
