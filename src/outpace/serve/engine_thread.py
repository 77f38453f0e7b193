"""The one thread that runs rounds, the mailbox through which others reach it, and its jobs: the
texts of one call in the making."""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import perf_counter

from outpace.engine.engine import Engine
from outpace.engine.request import EngineRequest, FinishReason, Logprob
from outpace.errors import ProcessLost

log = logging.getLogger("outpace.serve")


@dataclass(frozen=True)
class Delta:
    """What one text has got since the last delta. Joined together, deltas are the whole text."""

    index: int
    text: str
    tokens: Sequence[int]
    logprobs: Sequence[dict[int, Logprob]]
    finish_reason: FinishReason | None
    error: Exception | None = None


@dataclass(eq=False)
class Job:
    """The texts of one call. ``deliver`` is called in the engine's thread, once a round at most.

    client: who asks, as far as it is known. Times are those of ``perf_counter``; None until it
    happens. first_counts: how many tokens each text had when the first one came: a round may
    bring several. ended: when the engine let go of the job.
    """

    requests: Sequence[EngineRequest]
    deliver: Callable[[list[Delta]], None]
    seconds: float
    client: Hashable = None
    arrived: float = field(default_factory=perf_counter)
    began: float | None = None
    first_token: float | None = None
    first_counts: Sequence[int] = ()
    ended: float | None = None
    _sent: list[int] = field(default_factory=list)
    _done: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._sent = [0] * len(self.requests)
        self._done = [False] * len(self.requests)
        for request in self.requests:
            request.client = self.client

    @property
    def deadline(self) -> float:
        """When its time is over."""
        return self.arrived + self.seconds

    @property
    def waits(self) -> bool:
        """Whether there is no news of any text: none has had a row, and none has ended."""
        return not any(one.admitted_token_ids or one.finished for one in self.requests)

    @property
    def finished(self) -> bool:
        """Whether the end of every text was delivered."""
        return all(self._done)

    @property
    def longest(self) -> int:
        """The index of the text with the most tokens."""
        return max(range(len(self.requests)), key=lambda at: len(self.requests[at].output_ids))

    @property
    def tokens(self) -> int:
        """Tokens generated so far, in all texts."""
        return sum(len(request.output_ids) for request in self.requests)

    def failed(self, error: Exception) -> list[Delta]:
        """Returns the last deltas of texts that cannot be decoded."""
        self._done = [True] * len(self.requests)
        return [Delta(index, "", [], [], "error", error) for index in range(len(self.requests))]

    def news(self) -> list[Delta]:
        """Returns what has not been delivered yet."""
        deltas = (self._delta(index, one) for index, one in enumerate(self.requests))
        return [delta for delta in deltas if delta is not None]

    def _delta(self, index: int, request: EngineRequest) -> Delta | None:
        if self._done[index] or not (request.streaming or request.finished):
            return None
        text = request.new_text()
        begin, end = self._sent[index], len(request.output_ids)
        if not (text or request.finished):
            return None
        self._sent[index], self._done[index] = end, request.finished
        return Delta(
            index,
            text,
            request.output_ids[begin:end],
            request.logprobs[begin:end],
            request.finish_reason,
            request.error,
        )


# -- the thread ------------------------------------------------------------------------------------

ATTEMPTS = 2
"""Steps that may fail one after another before the requests in the batch are given up."""


class QueueFull(Exception):
    """More texts wait than the server lets wait."""


class TooManyRequests(Exception):
    """A client has more texts open than the server lets one have."""


class ShuttingDown(Exception):
    """The server takes no more requests."""


class OutOfTime(Exception):
    """A request took longer than the server lets one take."""


class EngineThread:
    """Plays rounds in a thread of its own as long as there is work.

    Other threads only ever put something into its mailbox, which is emptied between two rounds. So
    a request that is cancelled gives its row back within a round, a client that reads slowly holds
    up nobody, and an error that belongs to one request ends that request alone. A step that fails
    for another reason is run again; if it fails again, the requests in the batch end with its
    error, and the others go on.

    ended: is called with every job that ended, in the engine's thread. max_waiting: texts that may
    wait for a row. max_per_client: texts of one client that may wait or be written.
    """

    def __init__(
        self,
        engine: Engine,
        max_waiting: int,
        ended: Callable[[Job], None] = lambda job: None,
        max_per_client: int | None = None,
    ) -> None:
        self.engine = engine
        self._room = engine.target.max_rows + max_waiting
        self._room_of_one = max_per_client
        self._ended = ended
        self._mailbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # Texts that were submitted and have not ended: all of them, and by client.
        self._live = 0
        self._live_by_client: Counter[Hashable] = Counter()
        self._accepts = False
        self._idle = threading.Event()
        self._idle.set()
        self._jobs: list[Job] = []
        self._deadline = math.inf  # no job's comes earlier
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="outpace-engine", daemon=True)

    # -- from other threads ------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread."""
        self._accepts = True
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether rounds can be run."""
        return self._thread.is_alive()

    @property
    def accepts(self) -> bool:
        """Whether new requests are taken."""
        return self._accepts and self.alive

    @property
    def running(self) -> int:
        """Texts that have a row."""
        return len(self.engine.running)

    @property
    def waiting(self) -> int:
        """Texts that wait for a row."""
        return max(0, self._live - self.running)

    def submit(self, job: Job) -> None:
        """Hands over a job; raises `QueueFull`, `TooManyRequests` or `ShuttingDown`."""
        texts = len(job.requests)
        with self._lock:
            if not self.accepts:
                raise ShuttingDown
            own = self._live_by_client[job.client] + texts
            if self._room_of_one is not None and own > self._room_of_one:
                raise TooManyRequests
            if self._live + texts > self._room:
                raise QueueFull
            self._live += texts
            self._live_by_client[job.client] = own
            self._idle.clear()
            self._mailbox.put(lambda: self._take(job))

    def cancel(self, job: Job) -> None:
        """Ends a job where it is; nothing happens to one that has ended."""
        self._mailbox.put(lambda: self._abort(job))

    def run_between_rounds(self, work: Callable[[], None]) -> Future[None]:
        """Lets the thread do some work between two rounds. What is returned is done when the work
        is, or has its error; raises `ShuttingDown`."""
        done: Future[None] = Future()

        def do() -> None:
            try:
                work()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        with self._lock:
            if not self.accepts:
                raise ShuttingDown
            self._mailbox.put(do)
        return done

    def refuse(self) -> None:
        """Takes no more requests; those that were taken go on."""
        self._accepts = False  # no lock: a signal handler may call this at any time

    def end_all(self) -> None:
        """Ends every job where it is."""
        self._mailbox.put(self._abort_all)

    def close(self, seconds: float) -> bool:
        """Takes no more requests, lets the others go on for so long, ends what is left, and stops
        the thread. Returns whether every request came to its own end."""
        self.refuse()
        done = self._idle.wait(seconds) if self.alive else True
        self.end_all()
        with self._lock:  # nobody hands over a job after the last message
            self._mailbox.put(None)
        if self.alive:
            self._thread.join()
        return done

    # -- in the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                if not self._read_mail():
                    return
                self._run_round()
            except BaseException:  # of the server's own: the next round is run
                log.exception("the engine's thread caught an error of its own")

    def _read_mail(self) -> bool:
        """Does what the mailbox says; waits for mail if there is nothing else to do. Returns
        whether to go on."""
        while True:
            try:
                message = self._mailbox.get(block=False)
            except queue.Empty:
                if self._jobs or self.engine.running:
                    return True
                self.engine.flush()
                message = self._mailbox.get()
            if message is None:
                self._abort_all()  # also what was handed over while the server was closing
                self.engine.flush()
                return False
            message()

    def _take(self, job: Job) -> None:
        self._jobs.append(job)
        self._deadline = min(self._deadline, job.deadline)
        for request in job.requests:
            try:
                self.engine.add(request)
            except Exception as error:
                request.fail(error)
        if perf_counter() >= job.deadline:
            self._stop(job, OutOfTime())

    def _abort(self, job: Job) -> None:
        for request in job.requests:
            self.engine.remove(request)
        self._settle([job] if job in self._jobs else [])

    def _abort_all(self) -> None:
        for job in list(self._jobs):
            self._stop(job, ShuttingDown())
        self._settle(self._jobs)

    def _stop(self, job: Job, error: Exception) -> None:
        for request in job.requests:
            if not request.finished:
                request.fail(error)
                self.engine.remove(request)

    def _run_round(self) -> None:
        try:
            self.engine.step()
            self._failures = 0
        except BaseException as error:  # also a panic of a library in Rust, which is no Exception
            self._failures += 1
            log.exception("a round failed (%d of %d attempts)", self._failures, ATTEMPTS)
            if isinstance(error, ProcessLost):
                self.refuse()
                self._give_up(error, len(self.engine.running) + len(self.engine.waiting))
            elif self._failures >= ATTEMPTS:
                self._give_up(_fault(error), self.engine.target.max_rows)
        now = perf_counter()
        if now > self._deadline:
            for job in self._jobs:
                if now > job.deadline:
                    self._stop(job, OutOfTime())
            self._deadline = min(
                (one.deadline for one in self._jobs if now <= one.deadline), default=math.inf
            )
        known = [job for job in self._jobs if not job.waits]  # many may wait
        for job in known:
            self._note_times(job, now)
        self._settle(known)

    def _give_up(self, error: Exception, count: int) -> None:
        """Ends the requests that the engine cannot get on with, which are the first in its order:
        those in the batch, or put back in front of the queue."""
        self._failures = 0
        stuck = [*self.engine.running, *self.engine.waiting][:count]
        for request in stuck:
            if not request.finished:
                request.fail(error)

    def _note_times(self, job: Job, now: float) -> None:
        if job.began is None and any(request.admitted_token_ids for request in job.requests):
            job.began = now
        if job.first_token is None and job.tokens:
            job.first_token = now
            job.first_counts = [len(request.output_ids) for request in job.requests]

    def _settle(self, jobs: Sequence[Job]) -> None:
        """Lets go of the jobs that have ended, and delivers news: whoever hears of the end of a
        job finds its room free."""
        news = [(job, self._news(job)) for job in jobs]
        ended = [job for job in jobs if job.finished]
        if ended:
            self._let_go(ended)
        for job, deltas in news:
            if not deltas:
                continue
            try:
                job.deliver(deltas)
            except Exception:  # nobody is there any more
                log.exception("a text could not be delivered, and is dropped")
                for request in job.requests:
                    request.abort()

    def _news(self, job: Job) -> list[Delta]:
        """What there is to deliver; a text that cannot be decoded, because its tokenizer fails,
        ends with that error."""
        try:
            return job.news()
        except BaseException as error:
            self._stop(job, _fault(error))
            return job.failed(_fault(error))

    def _let_go(self, ended: Sequence[Job]) -> None:
        self._jobs = [job for job in self._jobs if job not in ended]
        now = perf_counter()
        for job in ended:
            job.ended = now
            self._ended(job)
        with self._lock:
            for job in ended:
                self._live -= len(job.requests)
                self._live_by_client[job.client] -= len(job.requests)
            self._live_by_client += Counter()  # forgets the clients that have none left
            if not self._live:
                self._idle.set()


def _fault(error: BaseException) -> Exception:
    """Returns an error as what a request may end with."""
    if isinstance(error, Exception):
        return error
    fault = RuntimeError(f"{type(error).__name__}: {error}")
    fault.__cause__ = error
    return fault
