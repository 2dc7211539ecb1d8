"""What ``forebay inspect`` prints for a person."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.cli.terminal import Terminal
from pipeline.cli.words import counted, in_bytes, number
from pipeline.tools.figures import Figures
from pipeline.tools.history import GenerationLine, LifeLine
from pipeline.tools.inspecting import Inspected
from pipeline.tools.one_file import JournalFacts, SegmentFacts
from pipeline.tools.rollouts import TaskFacts
from pipeline.tools.rows import BufferFacts

_NEWEST = 10  # generations and lives that are shown
_WRONG = 5
_VERSIONS = 8
_KINDS = {
    "pipeline": "run of rollouts",
    "replay": "buffer of transitions",
    "trajectories": "buffer of trajectories",
    "replay shards": "buffer of transitions, in shards",
    "trajectory shards": "buffer of trajectories, in shards",
    "": "run",
}
_STATES = ("waiting", "running", "parked", "buffered", "leased", "trained", "retired")


def show(out: Terminal, found: Inspected) -> None:
    """Print all that was found."""
    if found.journal is not None:
        _journal(out, found, found.journal)
    elif found.segment is not None:
        _segment(out, found, found.segment)
    else:
        _head(out, found)
        _tasks(out, found.tasks)
        _buffers(out, found.buffers)
        _history(out, found)
        _wrong(out, found)


def _head(out: Terminal, found: Inspected) -> None:
    status = found.status
    state = f": {status.state}" if status is not None else f", a {found.what}"
    out.title(f"{found.path}{state}")
    if status is not None:
        out.line(status.why, indent=2)
    pairs = [("holds", f"{_KINDS.get(found.kind, found.kind)}, run id {found.run_id}")]
    if found.generation is not None:
        pairs.append(("newest" if found.what == "run" else "is", _generation(found.generation)))
    if found.attached:
        pairs.append(("trainer", ", ".join(found.attached)))
    if found.own:
        pairs.append(("own", f"{', '.join(found.own)}, of each rank"))
    if found.world_size > 1:
        pairs.append(("ranks", str(found.world_size)))
    if found.space is not None:
        space = found.space
        pairs.append(
            (
                "bytes",
                f"{in_bytes(space.total)}: segments {in_bytes(space.segments)}, generations "
                f"{in_bytes(space.generations)} (of that the trainer's {in_bytes(space.trainer)}), journals "
                f"{in_bytes(space.journals)}",
            )
        )
    out.fields(pairs)


def _generation(line: GenerationLine) -> str:
    text = f"generation {line.generation}, step {line.step}, {line.written} ({line.reason}), {in_bytes(line.bytes)}"
    if line.without:
        text += f", without {', '.join(line.without)}"
    return text + (f", with {line.external}" if line.external else "")


# -- what it holds -----------------------------------------------------------------------------------------------


def _tasks(out: Terminal, tasks: list[TaskFacts]) -> None:
    if not tasks:
        return
    out.line()
    out.title("Items")
    shown = [name for name in _STATES if any(task.states.get(name) for task in tasks)]
    reasons = sorted({reason for task in tasks for reason in task.dropped})
    header = ["task", "drawn", "claimed", *shown, *reasons]
    rows = [
        [
            task.task,
            _drawn(task),
            number(task.claimed),
            *(number(task.states.get(name, 0)) for name in shown),
            *(number(task.dropped.get(reason, 0)) for reason in reasons),
        ]
        for task in tasks
    ]
    out.table(header, rows)
    out.line()
    out.title("Rollouts")
    named = [(task.task, of) for task in tasks for of in _figures_of(task)]
    _figures(out, "task", named)
    for task in tasks:
        _more_of(out, task)


def _drawn(task: TaskFacts) -> str:
    if task.epoch < 0:
        return "nothing"
    of = f" of {task.length:,}" if task.length >= 0 else ""
    return f"{task.drawn:,}{of} in epoch {task.epoch + 1}"


def _figures_of(task: TaskFacts) -> Iterator[tuple[str, Figures]]:
    yield "reward", task.rewards
    if task.lengths.most:
        yield "tokens", task.lengths
    yield "seconds", task.seconds


def _figures(out: Terminal, name: str, rows: list[tuple[str, tuple[str, Figures]]]) -> None:
    """Print figures as a table, with how they are spread as a line of blocks."""
    cells = [
        [who, what, number(each.count), number(each.mean), number(each.least), number(each.most), each.line]
        for who, (what, each) in rows
        if each.count
    ]
    if cells:
        out.table([name, "of", "count", "mean", "least", "most", "spread"], cells)


def _more_of(out: Terminal, task: TaskFacts) -> None:
    pairs = []
    attempts = [
        (task.finished, "members finished"), (task.failed, "attempts failed"), (task.interrupted, "interrupted"),
        (task.reopened, "groups run again"), (task.rows, "rows added"), (task.evaluated, "evaluated"),
    ]  # fmt: skip
    pairs.append((task.task, ", ".join(f"{count:,} {what}" for count, what in attempts if count) or "nothing ran"))
    if task.versions:
        pairs.append(("versions", f"of groups that wait: {_versions(task.versions)}"))
    pairs += [("failed with", f"{error} ({count:,} times)") for error, count in task.errors.items()]
    out.fields(pairs)


def _versions(versions: dict[int, int] | dict[str, int]) -> str:
    """Return how many there are of each version; of many the first and the last."""
    items = [f"{version}: {count:,}" for version, count in versions.items()]
    if len(items) > _VERSIONS:
        half = _VERSIONS // 2
        items = [*items[:half], f"{len(items) - _VERSIONS} more", *items[-half:]]
    return ", ".join(items)


def _buffers(out: Terminal, buffers: list[BufferFacts]) -> None:
    if not buffers:
        return
    of_trajectories = buffers[0].capacity is None
    out.line()
    out.title("Trajectories" if of_trajectories else "Rows")
    header = ["rank"] if buffers[0].rank is not None else []
    header += ["there", "rows"] if of_trajectories else ["there", "capacity", "added", "episodes", "open"]
    out.table([*header, "blocks", "bytes"], [_buffer(each, of_trajectories) for each in buffers])
    out.line()
    named = [(_name(each), of) for each in buffers for of in _of_buffer(each, of_trajectories)]
    _figures(out, "buffer", named)
    first = buffers[0]
    pairs = [("sampled", f"{first.selection or 'never yet'}; the first to go: {first.remove}")]
    for each in buffers:
        name = "" if each.rank is None else f" of rank {each.rank}"
        if each.versions:
            pairs.append((f"versions{name}", _versions(each.versions)))
        if each.ends:
            pairs.append((f"ends{name}", ", ".join(f"{count:,} {how}" for how, count in each.ends.items())))
    out.fields(pairs)
    if first.columns:
        out.line()
        out.title("Columns")
        out.table(
            ["name", "dtype", "shape"],
            [[column.name, column.dtype, str(list(column.shape))] for column in first.columns],
        )


def _name(buffer: BufferFacts) -> str:
    return "all" if buffer.rank is None else f"rank {buffer.rank}"


def _buffer(each: BufferFacts, of_trajectories: bool) -> list[str]:
    rank = [] if each.rank is None else [str(each.rank)]
    if of_trajectories:
        counts = [number(each.episodes), number(each.rows)]
    else:
        counts = [*map(number, (each.rows, each.capacity, each.added, each.episodes, each.open_episodes))]
    return [*rank, *counts, number(each.blocks), in_bytes(each.bytes)]


def _of_buffer(each: BufferFacts, of_trajectories: bool) -> Iterator[tuple[str, Figures]]:
    yield "reward", each.rewards
    yield "steps" if of_trajectories else "episode's rows", each.lengths
    yield "priority", each.priorities


# -- how it came about, and what is wrong ------------------------------------------------------------------------


def _history(out: Terminal, found: Inspected) -> None:
    if found.generations:
        out.line()
        out.title(_titled("Generations", len(found.generations)))
        out.table(
            ["number", "step", "written", "reason", "bytes", "from", "life"],
            [_row(each) for each in found.generations[-_NEWEST:]],
        )
    lives = found.lives
    if lives:
        out.line()
        out.title(_titled("Lives", len(lives)))
        out.table(
            ["life", "rank", "began", "from", "ended", "events", "bytes"], [_life(each) for each in lives[-_NEWEST:]]
        )


def _titled(name: str, count: int) -> str:
    return name if count <= _NEWEST else f"{name}: the newest {_NEWEST} of {count:,}"


def _row(line: GenerationLine) -> list[str]:
    came = f"run {line.origin}" if line.origin else f"{line.parent}" if line.parent >= 0 else "-"
    reason = line.reason + (f", without {', '.join(line.without)}" if line.without else "")
    size = in_bytes(line.bytes)
    return [str(line.generation), str(line.step), line.written, reason, size, came, str(line.incarnation)]


def _life(line: LifeLine) -> list[str]:
    came = f"run {line.origin}" if line.origin else f"generation {line.recovered}" if line.recovered >= 0 else "-"
    ended = f"{line.ended} ({line.reason})" if line.reason and line.ended else line.ended or "no last word"
    began = line.began + (f" on {line.host}, process {line.process}" if line.host else "")
    return [
        str(line.incarnation),
        str(line.rank),
        began or "-",
        came,
        ended,
        number(line.events),
        in_bytes(line.bytes),
    ]


def _wrong(out: Terminal, found: Inspected) -> None:
    damages = found.status.damages if found.status is not None else []
    notes = [*found.notes, *(found.status.notes if found.status is not None else [])]
    if not damages and not notes:
        return
    out.line()
    out.line(f"Wrong: {counted(len(damages) + len(notes), 'thing')}", style="bad")
    for damage in damages[:_WRONG]:
        out.line(damage.what, indent=2)
    for note in notes[:_WRONG]:
        out.line(note, indent=2)
    out.line(f"forebay verify {found.path} looks at everything, and says what is lost.", indent=2)


# -- single files ------------------------------------------------------------------------------------------------


def _journal(out: Terminal, found: Inspected, facts: JournalFacts) -> None:
    out.title(f"{found.path}: a journal")
    pairs = [
        ("of", f"incarnation {facts.incarnation}, rank {facts.rank}, of run {found.run_id}..."),
        ("holds", f"{counted(facts.events, 'event')} in {in_bytes(facts.bytes)}"),
        ("began", facts.began or "it does not say"),
        ("ended", facts.ended or "it has no last word"),
        ("synced", f"{counted(facts.marks, 'mark')}, the last after event {facts.synced}"),
        *([("forked", f"from run {facts.origin}")] if facts.origin else []),
    ]
    out.fields(pairs)
    if facts.by_kind:
        out.line()
        out.table(["event", "count"], [[kind, number(count)] for kind, count in facts.by_kind.items()])
    _end(out, facts)


def _segment(out: Terminal, found: Inspected, facts: SegmentFacts) -> None:
    out.title(f"{found.path}: a segment")
    shown = ", ".join(map(str, facts.first_uids))
    more = ", ..." if facts.uids > len(facts.first_uids) else ""
    again = f", {facts.again:,} of groups that had been reopened" if facts.again else ""
    out.fields(
        [
            ("of", f"incarnation {facts.incarnation}, rank {facts.rank}, of run {found.run_id}..."),
            ("holds", f"{counted(facts.payloads, 'payload')} in {in_bytes(facts.bytes)}{again}"),
            ("uids", f"{facts.uids:,}: {shown}{more}" if facts.uids else "none"),
            ("sealed", "by a footer" if facts.sealed else "no footer: it was being written when its life ended"),
        ]
    )
    out.line()
    _figures(out, "payload", [("all", ("bytes", facts.lengths))])
    _end(out, facts)


def _end(out: Terminal, facts: JournalFacts | SegmentFacts) -> None:
    if facts.left:
        out.line(f"{facts.left:,} bytes at its end are a record that a crash cut off", style="faint", indent=2)
    if facts.wrong:
        out.line(f"Wrong: {facts.wrong}", style="bad", indent=2)
