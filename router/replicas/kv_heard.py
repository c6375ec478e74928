"""One worker's events as they reach us through the replica that reads them."""

from __future__ import annotations

from collections.abc import Callable

from kvkernels import EventBatch
from policies.facts import KvCopied, KvEvents, KvHeard
from router.core.wire_events import WireEvents
from router.core.workers import Worker
from router.replicas.kv_messages import KvBatch, KvCopy, KvHead, KvWanted
from router.replicas.kv_outlet import NOWHERE, Place

_ASK_AGAIN_S = 0.5
_REFUSED_S = 10.0  # after a copy that could not be used

KvFact = KvEvents | KvCopied | KvHeard


class Heard:
    """Lifetime: while we want this worker's events and do not read them.

    What the core has is the state of `place`; a number 0 there says that it is of none. In step:
    nothing was missed since. Heard: and the reader is there.
    """

    def __init__(
        self, name: str, worker: Callable[[], Worker | None], tell: Callable[[KvFact], None]
    ) -> None:
        """`worker`: as the core has it; `tell` hands the core a fact."""
        self.name = name
        self.place: Place = NOWHERE
        self.in_step = False
        self.applied = False  # something that was told stands in the core
        self.reader: str | None = None  # who was heard last
        self.gaps = self.copies = self.batches = self.refused = 0
        self._worker, self._tell = worker, tell
        self._told_heard = True  # as the core was told
        self._pieces: list[bytes] = []
        self._of: tuple[int, ...] = ()  # the batch or copy that these are of
        self._wanted_s = float("-inf")  # not to be asked before

    @property
    def heard(self) -> bool:
        """All is known, and what follows will be."""
        return self.in_step and self.reader is not None

    def wanted(self, now_s: float) -> KvWanted | None:
        """What to ask for now."""
        if self.heard or now_s < self._wanted_s:
            return None
        self._wanted_s = now_s + _ASK_AGAIN_S
        return KvWanted(self.name, *self.place)

    def behind(self, now_s: float) -> None:
        """Something was missed."""
        self.gaps += self.in_step
        self.in_step = False
        self._wanted_s = min(self._wanted_s, now_s)
        self.update(now_s)

    def lost(self, now_s: float) -> None:
        """What the core has is the state of no place any more."""
        self._lose((self.place[0], 0))
        self.behind(now_s)

    def follow(self, place: Place, now_s: float) -> None:
        """We read until `place`; somebody else is to go on from there."""
        self.place, self.in_step, self._told_heard = place, True, True
        self.applied = True
        self.silent(now_s)

    def begin_reading(self, now_s: float) -> None:
        """We read ourselves: as far as anybody knows nothing is missing, or a hole will show it."""
        worker = self._worker()
        if worker is not None:
            self._tell_heard(now_s, worker)

    def silent(self, now_s: float) -> None:
        """The reader is heard no more."""
        self.reader, self._pieces, self._of = None, [], ()
        self._wanted_s = now_s
        self.update(now_s)

    def hear(self, peer: str, said: KvHead | KvBatch | KvCopy, now_s: float) -> None:
        """What a reader says; it may be another one than before, or an old one."""
        token = self.place[0]
        if said.token < token:
            return
        was_heard = self.heard
        if type(said) is KvHead:
            self._head(said)
        elif said.token > token:
            self._lose((said.token, 0))
        if peer != self.reader:
            self.reader = peer
            self._pieces, self._of = [], ()
        if type(said) is KvBatch:
            self._batch(said, now_s)
        elif type(said) is KvCopy:
            self._copy(said, now_s)
        if was_heard and not self.heard:
            self.gaps += 1
            self._wanted_s = min(self._wanted_s, now_s)
        self.update(now_s)

    def update(self, now_s: float) -> None:
        """Tell the core whether this worker's events reach us, where that changed."""
        if self.heard != self._told_heard:
            self._told_heard = self.heard
            worker = self._worker()
            if worker is not None:
                self._tell(KvHeard(now_s, worker.worker_id, self.heard))

    # --- inside -------------------------------------------------------------------------------

    def _head(self, head: KvHead) -> None:
        token, number = self.place
        if head.token > token:
            if self.in_step and self.place == (head.after_token, head.after_number):
                number = head.first
            else:
                self._lose((head.token, 0))
                return
            self.place = head.token, number
        self.in_step = head.number == number or (self.in_step and head.number < number)

    def _lose(self, place: Place) -> None:
        self.place, self.in_step = place, False

    def _batch(self, said: KvBatch, now_s: float) -> None:
        token, number = self.place
        if not self.in_step or said.number < number:
            return
        if said.number > number:
            self.in_step = False
            return
        body = self._whole((1, said.number), said.piece, said.pieces, said.body)
        worker = self._worker()
        if body is None or worker is None:
            return
        try:
            events = WireEvents(EventBatch(body), worker.facts.models[0], len(body))
        except ValueError:
            self._lose((token, 0))
            return
        self.place = token, number + 1
        self.batches += 1
        self._tell_heard(now_s, worker)
        self._tell(KvEvents(now_s, worker.worker_id, said.seq, events, "live", said.digest))

    def _copy(self, said: KvCopy, now_s: float) -> None:
        self.in_step = self.in_step and said.number <= self.place[1]
        if self.in_step:
            return
        self._wanted_s = max(self._wanted_s, now_s + _ASK_AGAIN_S)  # it is on its way
        body = self._whole((2, said.number), said.piece, said.pieces, said.body)
        worker = self._worker()
        if body is None or worker is None:
            return
        self.place, self.in_step, self.applied = (said.token, said.number), True, True
        self._told_heard = True
        refused = worker.kv.counters.refused_copies
        where = said.next_seq, said.live_seq, said.digest
        flags = said.exact, said.turned_over
        self._tell(KvCopied(now_s, worker.worker_id, *where, *flags, body))
        self.copies += 1
        if worker.kv.counters.refused_copies > refused:
            self.refused += 1
            self._lose((said.token, 0))
            self._wanted_s = now_s + _REFUSED_S

    def _tell_heard(self, now_s: float, worker: Worker) -> None:
        if not self._told_heard:
            self._told_heard = True
            self._tell(KvHeard(now_s, worker.worker_id, True))

    def _whole(self, of: tuple[int, ...], piece: int, pieces: int, body: bytes) -> bytes | None:
        """All pieces in one, with the last of them. They come in order, or not at all."""
        if piece == 0:
            self._of, self._pieces = of, []
        elif of != self._of or piece != len(self._pieces):
            self._of, self._pieces = (), []
            return None
        self._pieces.append(body)
        if piece + 1 < pieces:
            return None
        whole, self._of, self._pieces = b"".join(self._pieces), (), []
        return whole
