"""Calls a policy, which may be foreign code, and suspends it if it fails too often."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, get_args

from kvkernels import cheapest
from policies.contract import FleetView, Floats, RequestView
from policies.facts import Fact
from policies.load import RAISABLE, LoadedPolicy, NotACostError, PolicyError, WrapperFailedError
from policies.pick import pick
from router.core.contract.actions import checked_terms
from router.core.placement.native_warmset import native_costs

BACKOFF_S = 10.0  # the first suspension
BACKOFF_MAX_S = 600.0  # it doubles up to here
# Decisions of the trial after a suspension; one fault in it suspends the policy again.
TRIAL_DECISIONS = 20
_IN_A_ROW = 0b11111  # this many faulty decisions in a row suspend
_RECENT = (1 << 20) - 1
_RECENT_FAULTS = 10  # more of the recent decisions than this being faulty suspend


class Suspension:
    """Counts the faulty decisions of one policy, and decides when the policy is suspended. Five
    faulty decisions in a row, or more than half of the last twenty, suspend the policy. After a
    suspension the policy is on trial: one fault then suspends it again for twice as long. Several
    faults between two decisions count as one. Lifetime: until another policy is set.
    """

    def __init__(self) -> None:
        self.active = False
        self.until_s = -math.inf  # of the latest suspension
        self.backoff_s = BACKOFF_S  # of the latest suspension, or of the next one
        self._recent = 0  # a bit for each decision, the latest lowest: 1 is faulty
        self._trial = 0  # decisions left in the trial plus one: the trial is over at that one

    def decided(self) -> None:
        """Count a new decision as good. If `fault` is called before the next decision, it counts as
        faulty instead.
        """
        self._recent = self._recent << 1 & _RECENT
        if self._trial:
            self._trial -= 1
            if not self._trial:
                self.backoff_s = BACKOFF_S

    def fault(self, now_s: float) -> bool:
        """Count the latest decision as faulty, and return True if this suspends the policy."""
        if self.active:
            return False
        self._recent |= 1
        in_a_row = self._recent & _IN_A_ROW == _IN_A_ROW
        if not (self._trial or in_a_row or self._recent.bit_count() > _RECENT_FAULTS):
            return False
        if self._trial:
            self.backoff_s = min(self.backoff_s * 2, BACKOFF_MAX_S)
        self.active = True
        self.until_s = now_s + self.backoff_s
        return True

    def end(self, now_s: float) -> bool:
        """End the suspension and begin a trial, if the time of the suspension is over.

        Return True if the suspension ended.
        """
        if now_s < self.until_s:
            return False
        self.active = False
        self._recent, self._trial = 0, TRIAL_DECISIONS + 1
        return True


FaultKind = Literal["raised", "nan", "shape", "slow", "terms"]
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)


class Use(Protocol):
    """The CPU time of a thread and its number of voluntary context switches, as in
    `resource.getrusage`.
    """

    @property
    def ru_utime(self) -> float: ...  # CPU seconds
    @property
    def ru_stime(self) -> float: ...
    @property
    def ru_nvcsw(self) -> int: ...  # switches to other threads of its own accord


class Verdict(NamedTuple):
    """The result of a policy call: the cost of each worker, and the row of the chosen worker."""

    policy: LoadedPolicy  # the policy that decided: the one in use, or the fallback
    costs: Floats
    row: int  # `pick.HOLD`: no worker


_COUNTED_POLICIES = 64  # by name, because each reload may bring another policy
_TEXT_CHARS = 500  # of an error's own text


class PolicyFaultError(PolicyError):
    """Raised for a fault of a policy; its text names the policy and says what was expected."""

    def __init__(self, policy: str, kind: FaultKind, text: str) -> None:
        super().__init__(f"policy {policy} {text}")
        self.policy = policy
        self.kind = kind
        self._text = text
        self.suspended_s = 0.0  # for this long the policy is suspended because of this fault

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the parts of the error for pickling, so that it can be passed to another
        process.
        """
        return PolicyFaultError, (self.policy, self.kind, self._text)


class FallbackError(RuntimeError):
    """Raised if the built-in fallback policy fails, too, which is a defect of this router."""


def raising(fault: PolicyFaultError) -> None:
    """Raise the policy's fault, so that a replay of recorded facts stops and does not continue with
    the fallback policy.
    """
    raise fault


def no_time() -> float:
    """Return 0.0 as the time, so that no policy ever counts as slow, for example in a
    simulation.
    """
    return 0.0


class PolicyGuard:
    """Calls the policy in use, keeps its memory, and suspends it if it fails too often. `report` is
    called with every fault of the policy; if it returns, the fallback policy decides. `clock`
    measures the seconds of each call; a call longer than `slow_s` is a fault. `use` returns the CPU
    time of the thread, which shows if the policy is slow or the machine was paused; if it is None,
    all of a call's time counts. Lifetime: process.
    """

    def __init__(
        self,
        policy: LoadedPolicy,
        fallback: LoadedPolicy,
        report: Callable[[PolicyFaultError], None] = raising,
        clock: Callable[[], float] = no_time,
        slow_s: float = math.inf,
        use: Callable[[], Use] | None = None,
    ) -> None:
        self.fallback = fallback
        self.faults: Counter[tuple[str, str]] = Counter()  # (policy, kind); of 64 policies at most
        self.last_fault: PolicyFaultError | None = None  # of the policy in use
        self.since_s = math.inf  # when the call under way began, on `clock`; +inf: there is none
        self.use = use
        self.overdue_s = 0.0  # the slowest call since `settle_slow`; 0: none was too slow
        self._times: array[float] | None = None  # of all calls; None: they are not recorded
        self._bears_s = slow_s
        self._report = report
        self._clock = clock
        self._slow_s = slow_s
        self.set_policy(policy)

    def measure(self, times: array[float]) -> None:
        """Append the seconds of each later policy call to `times`, and treat no call as slow."""
        self._times, self._bears_s, self._slow_s = times, self._slow_s, 0.0

    def set_policy(self, policy: LoadedPolicy) -> None:
        """Use `policy` for decisions from now on.

        Raises PolicyError if the policy fails to start; then the previous policy stays in use.
        """
        try:
            state: Any = policy.initial_state()
        except RAISABLE as error:
            raise PolicyFaultError(policy.name, "raised", _raised(error)) from error
        self.policy = policy
        self._native = native_costs(policy)
        self.remembers = policy.remembers
        self.passes_held = policy.passes_held
        self._state = state
        self.unit = None if policy.wrappers else getattr(policy.policy, "unit", None)
        self.last_fault = None
        self.suspension = Suspension()  # while active, the fallback decides

    # --- the policy's code --------------------------------------------------------------------

    def decide(self, request: RequestView, fleet: FleetView) -> Verdict:
        """Return the policy's decision, or the fallback's if the policy fails or is suspended.

        Raises FallbackError if the fallback policy fails, too.
        """
        if self.suspension.active and not self._woken(request.now_s):
            return self._by_fallback(request, fleet)
        self.suspension.decided()
        verdict = self._evaluate(request, fleet)
        return self._by_fallback(request, fleet) if verdict is None else verdict

    def consult(self, request: RequestView, fleet: FleetView) -> Verdict:
        """Return the policy's decision for a dry run, or the fallback's if the policy fails.

        A fault of the policy is counted, but does not suspend the policy. Raises FallbackError if
        the fallback policy fails, too.
        """
        verdict = None if self.suspension.active else self._evaluate(request, fleet, counts=False)
        return self._by_fallback(request, fleet) if verdict is None else verdict

    def observe(self, fact: Fact) -> None:
        """Pass a fact to a policy with a memory. If the policy fails, its memory stays
        unchanged.
        """
        if not self.remembers or self.suspension.active:
            return
        try:
            used = self.use and self.use()
            self.since_s = began_s = self._clock()
            self._state = self.policy.observe(fact, self._state)
            if (took_s := self._clock() - began_s) > self._slow_s:
                self._late(took_s, used)
        except RAISABLE as error:
            self._failed("raised", _raised(error), fact.now_s, error)
        finally:
            self.since_s = math.inf

    def asks_held(self, now_s: float) -> bool:
        """Return True if the policy wants to be asked about each held request now."""
        if not self.passes_held or self.suspension.active:
            return False
        try:
            return self.policy.asks_held(self._state)
        except RAISABLE as error:
            self._failed("raised", _raised(error), now_s, error)
            return False

    def terms(self, request: RequestView, fleet: FleetView) -> dict[str, Floats]:
        """Return the terms of the policy's costs, float64[rows] each, to explain a decision.

        The result is empty if the policy has no terms, fails, or is suspended. A failure is
        reported, but does not lead to a suspension.
        """
        if self.suspension.active:
            return {}
        try:
            self.since_s = self._clock()
            return checked_terms(self.policy.terms(request, fleet, self._state), len(fleet))
        except RAISABLE as error:
            self._failed("terms", _raised(error), request.now_s, error, counts=False)
            return {}
        finally:
            self.since_s = math.inf

    def settle_slow(self, now_s: float, took_s: float) -> None:
        """Count a policy call that took `took_s` seconds as a fault. Recordings repeat a call of
        this method, which is separate for that reason.
        """
        self.overdue_s = 0.0
        limit_ms = self._slow_s * 1e3
        text = f"took {took_s * 1e3:.1f} ms for one call; more than {limit_ms:g} ms is slow"
        self._failed("slow", text, now_s)

    def _evaluate(
        self, request: RequestView, fleet: FleetView, counts: bool = True
    ) -> Verdict | None:
        policy, costs = self.policy, None
        try:
            used = self.use and self.use()
            self.since_s = began_s = self._clock()
            native = self._native.costs(request, fleet) if self._native is not None else None
            costs = policy.costs(request, fleet, self._state) if native is None else native
            row = _row(costs, request.draw, policy.temperature)
            if (took_s := self._clock() - began_s) > self._slow_s:
                self._late(took_s, used)
            return Verdict(policy, costs, row)
        except RAISABLE as error:
            if costs is not None or isinstance(error, NotACostError):
                self._failed("nan", _raised(error), request.now_s, error, counts)
            elif isinstance(error, PolicyError) and not isinstance(error, WrapperFailedError):
                self._failed("shape", _raised(error), request.now_s, error, counts)
            else:
                self._failed("raised", _raised(error), request.now_s, error, counts)
            return None
        finally:
            self.since_s = math.inf

    def _by_fallback(self, request: RequestView, fleet: FleetView) -> Verdict:
        policy = self.fallback
        try:
            costs = policy.costs(request, fleet, None)
            return Verdict(policy, costs, pick(costs, request.draw, policy.temperature))
        except Exception as error:
            fault = PolicyFaultError(policy.name, "raised", _raised(error))
            self._count(fault)
            self._report(fault)
            raise FallbackError(str(fault)) from error

    # --- its faults ---------------------------------------------------------------------------

    def _late(self, took_s: float, used: Use | None) -> None:
        """Record a policy call of `took_s` seconds as slow, unless the machine caused the delay.

        Time in which other threads had the processor, or the machine was paused, does not count.
        Time in which the policy itself waited does count.
        """
        if self._times is not None and took_s <= self._bears_s:
            self._times.append(took_s)
            return
        if self.use is not None and used is not None:
            now = self.use()
            if now.ru_nvcsw == used.ru_nvcsw:
                took_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
        if self._times is not None:
            self._times.append(took_s)
        elif took_s > self._slow_s:
            self.overdue_s = max(self.overdue_s, took_s)

    def _failed(
        self,
        kind: FaultKind,
        text: str,
        now_s: float,
        cause: BaseException | None = None,
        counts: bool = True,
    ) -> None:
        fault = self.last_fault = PolicyFaultError(self.policy.name, kind, text)
        fault.__cause__ = cause
        self._count(fault)
        if counts and self.suspension.fault(now_s):
            fault.suspended_s = self.suspension.backoff_s
        self._report(fault)

    def _count(self, fault: PolicyFaultError) -> None:
        key = (fault.policy, fault.kind)
        if key not in self.faults and len({name for name, _ in self.faults}) >= _COUNTED_POLICIES:
            key = ("other", fault.kind)
        self.faults[key] += 1

    def _woken(self, now_s: float) -> bool:
        """Start a suspended policy again, with a new memory, if the time of its suspension is over.

        Return True if the policy is in use again.
        """
        if not self.suspension.end(now_s):
            return False
        try:
            self.since_s = self._clock()
            self._state = self.policy.initial_state()
        except RAISABLE as error:
            self._failed("raised", _raised(error), now_s, error)
        finally:
            self.since_s = math.inf
        return not self.suspension.active


def _row(costs: Floats, draw: float, temperature: float) -> int:
    """Return the row that `policies.pick.pick` would return, by faster native code if possible. If
    the costs are not valid, `pick` itself is called, because it raises the right error.
    """
    if temperature == 0.0:
        try:
            return cheapest(costs, draw)
        except (TypeError, ValueError):
            pass
    return pick(costs, draw, temperature)


def _raised(error: BaseException) -> str:
    try:
        text = str(error)[:_TEXT_CHARS]
    except Exception:  # noqa: BLE001 - its own `__str__` is somebody's code, too
        text = "(an error without a text)"
    kind = "" if isinstance(error, PolicyError) else f"{type(error).__name__}: "
    return f"failed: {kind}{text}"
