"""Every error that this library raises on purpose.

::

    ForebayError
    ├── ConfigError          (ValueError)    an option or argument is out of range
    ├── UsageError           (RuntimeError)  a verb was called at the wrong time
    │   └── ClosedError                      the pipeline is closed
    ├── RunnerError          (RuntimeError)  what the user's rollout function did
    │   ├── RolloutFailed                    it raised, and its policy says to stop
    │   ├── RolloutInvalid   (TypeError)     it returned what is no rollout
    │   │   └── RolloutTooDeep               its info is nested too deep: the attempt failed, the run goes on
    │   ├── GroupsRejected                   its filter, or what the filter rejects without end
    │   ├── RunnerRaised                     it raised, in another process
    │   ├── EnvironmentFailed                an environment of another package says that its episode failed
    │   ├── WorkerDied                       its worker process ended under it
    │   └── WorkerFailed                     no worker process can start, or import what it is to run
    ├── EndOfSource          (EOFError)      a finite source has nothing left
    ├── Starved              (RuntimeError)  waiting cannot help: nothing can be produced
    ├── TimedOut             (TimeoutError)  a limiter did not let it through in time, or there was no batch
    ├── RanksError           (RuntimeError)  what the ranks of a run do together
    │   ├── RankLost         (TimeoutError)  one of them was not heard from in time
    │   └── RankFailed                       one of them failed, or they do not agree
    ├── ServingError         (RuntimeError)  between the process that holds a pipeline and one that uses it
    │   ├── NotServed        (ConnectionError)  no process of this machine serves the run
    │   ├── PeerLost         (ConnectionError)  the other process ended
    │   └── RemoteError                      the other process raised what is no error of this tree
    ├── ChatError            (RuntimeError)  what a language model's server said, or did not say
    │   ├── ServerFailed     (ConnectionError)  no server answered, after every attempt that was allowed
    │   ├── RequestRefused   (ValueError)    a server refuses the request, and would again
    │   ├── ReplyInvalid     (ValueError)    a reply contradicts itself
    │   └── ChatLimit                        the conversation has no turn, token or time left
    ├── SourceError          (ValueError)
    │   └── SourceMismatch                   the run was begun with another source
    └── StoreError           (OSError)       what lies, or should lie, on the disk
        ├── NotARun                          the folder holds something else
        ├── OtherRun                         a file belongs to another run
        ├── NewerFormat                      written by a newer version
        ├── Damaged                          a file is cut, missing or altered
        ├── Locked                           another process writes in this folder
        └── WriteFailed                      a write, fsync or rename failed

To add one: subclass the family that a caller would catch, draw it above, and write a message that says
where, what was expected, what was found, and what to do next. Errors carry one message, so that they
survive a trip between processes.

:class:`Stopped` is no error, and outside the tree: a run that was asked to stop has saved, and leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ForebayError(Exception):
    """Root of every error that the library raises on purpose."""


class ConfigError(ForebayError, ValueError):
    """An option or argument is out of range; ``option`` names it."""

    def __init__(self, message: str, *, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option

    @classmethod
    def of(cls, option: str, value: object, allowed: str) -> ConfigError:
        """Build the usual message: the option's name, its value, and what is allowed."""
        return cls(f"{option}={value!r}: {allowed}", option=option)


class UsageError(ForebayError, RuntimeError):
    """A verb was called at the wrong time; the message says which verb is missing."""


class ClosedError(UsageError):
    """The pipeline is closed, or was never opened."""


class RunnerError(ForebayError, RuntimeError):
    """Something that a user's rollout function did."""


class RolloutFailed(RunnerError):
    """An attempt failed for good and its task's policy is to stop; the cause is the original error."""


class RolloutInvalid(RunnerError, TypeError):
    """A runner returned what is no rollout; the message names the task, the item and the field."""


class RolloutTooDeep(RolloutInvalid):
    """A rollout's ``info`` is nested too deep to be stored: the data's fault, so the attempt counts as failed."""


class GroupsRejected(RunnerError):
    """A task's filter raised, or has rejected too many groups in a row."""


class RunnerRaised(RunnerError):
    """What ran in another process raised; the message is the error's own, behind the name of its type.

    Attributes:
        type_name: the name of the error's type.
        traceback: where it was raised, as text; the error's note shows it as well.
    """

    def __init__(self, message: str, *, type_name: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.type_name, self.traceback = type_name, traceback


class EnvironmentFailed(RunnerError):
    """An environment of another package says that its episode came to nothing; the attempt has failed."""


class WorkerDied(RunnerError):
    """A worker process ended while it ran something: an attempt is lost, and run again.

    Attributes:
        pid: the process.
        signal: the name of the signal that ended it; None if it left by itself.
        code: its exit code; None if a signal ended it.
        stderr: the last lines that it wrote there.
        planned: whether it was ended on purpose, because of something else that it ran.
    """

    def __init__(
        self,
        message: str,
        *,
        pid: int = 0,
        signal: str | None = None,
        code: int | None = None,
        stderr: str = "",
        planned: bool = False,
    ) -> None:
        super().__init__(message)
        self.pid, self.signal, self.code, self.stderr, self.planned = pid, signal, code, stderr, planned


class WorkerFailed(RunnerError):
    """Worker processes cannot start, or cannot import what they are to run: the run ends, since nothing could run."""


class EndOfSource(ForebayError, EOFError):
    """Every item of every finite source has been handed out."""


class Starved(ForebayError, RuntimeError):
    """Waiting cannot help: nothing that could still be produced would be accepted."""


class TimedOut(ForebayError, TimeoutError):
    """A buffer's limiter did not let rows through in the time that was given, or no batch was there; nothing was
    changed."""

    def __init__(self, message: str, may: Callable[[], object] = bool) -> None:
        super().__init__(message)
        self.may = may
        """Whether it would let them through now."""

    def __reduce__(self) -> Any:
        return TimedOut, (str(self),)


class RanksError(ForebayError, RuntimeError):
    """Something that the ranks of a run do together was not done; nothing was changed."""


class RankLost(RanksError, TimeoutError):
    """A rank was not heard from in time: it ended, or is elsewhere; the message names it."""


class RankFailed(RanksError):
    """A rank failed, or differs from the others; the message names it, and says with what."""


class ServingError(ForebayError, RuntimeError):
    """Something between the process that holds a pipeline and one that uses it by ``connect``."""


class NotServed(ServingError, ConnectionError):
    """No process of this machine serves the run, or one that this process cannot talk to."""


class PeerLost(ServingError, ConnectionError):
    """The process that holds the pipeline ended, or broke the connection; connect again when it is back."""


class RemoteError(ServingError):
    """The other process raised what is no error of this tree; the message says what it was."""


class ChatError(ForebayError, RuntimeError):
    """Something about a conversation with a language model's server."""


class ServerFailed(ChatError, ConnectionError):
    """No server answered, after every attempt that was allowed; the cause is what the last one met."""


class RequestRefused(ChatError, ValueError):
    """A server refuses a request, and would refuse it again; the message has its words."""


class ReplyInvalid(ChatError, ValueError):
    """A reply contradicts itself: token ids and log-probs of different numbers, say."""


class ChatLimit(ChatError):
    """A conversation has no turn, token or time left.

    Attributes:
        what: ``turns``, ``tokens`` or ``time``.
    """

    def __init__(self, message: str, *, what: str = "") -> None:
        super().__init__(message)
        self.what = what


class SourceError(ForebayError, ValueError):
    """A source cannot serve what was asked of it."""


class SourceMismatch(SourceError):
    """The run was begun with another source than the one that it is resumed with."""


class StoreError(ForebayError, OSError):
    """Something about the files of a run."""


class NotARun(StoreError):
    """The folder holds something that is not a run."""


class OtherRun(StoreError):
    """A file in the folder belongs to another run."""


class NewerFormat(StoreError):
    """The file was written by a newer version of the library."""


class Damaged(StoreError):
    """A file is cut, missing or altered; the message names the file and the offset, and so does ``offset``, where the
    damage has a place."""

    def __init__(self, *message: object, offset: int | None = None) -> None:
        super().__init__(*message)
        self.offset = offset


class Locked(StoreError):
    """Another process writes in this folder; the message names it."""


class WriteFailed(StoreError):
    """A write, fsync or rename failed; the cause is the operating system's error."""


class Stopped(BaseException):
    """The run was asked to stop and has saved; raised by the trainer's verb that was in progress, or by the next one.

    Nothing needs to catch it, and ``except Exception`` does not. It ends the script, in whichever task it was raised,
    with ``code`` as the exit code and without a traceback: 128 plus the number of the signal that asked (143 for
    SIGTERM), else 0.

    Attributes:
        code: the exit code.
        reason: who asked.
        step: the trainer's step of the generation.
        generation: the newest generation, from which a resume goes on; None without a directory.
    """

    def __init__(self, code: int = 0, reason: str = "", step: int = 0, generation: int | None = None) -> None:
        super().__init__(code)
        self.code: Any = code
        self.reason, self.step, self.generation = reason, step, generation

    def __str__(self) -> str:
        where = "" if self.generation is None else f", generation {self.generation}"
        return f"stopped at step {self.step}{where}: {self.reason}"


class StoppedExit(Stopped, SystemExit):
    """What the synchronous form raises: a ``SystemExit`` as well.

    In the asynchronous one that would tear down the loop from within a task, and asyncio cannot always end after it.
    """
