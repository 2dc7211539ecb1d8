"""One buffer for several processes: its memory, its lock, and how the next one goes on where one was killed.

Everything that processes have in common lies in memory without a name; nothing is left of it when the last of them is
gone, however that went. A process looks at it, and changes it, under a lock that the kernel frees when its holder dies:

- On entry, :class:`~pipeline.buffer.transitions.shared.member.Member` takes over the counters that another process
  left; on leaving it commits its own, by one store of eight bytes. So rows, marks and priorities are only ever written
  beside what is committed, or after a note of what is about to be lost.
- Whoever comes in and finds that its predecessor never left (the *dirty* mark) repairs: it goes back to the counters
  that were committed, gives up the rows that were about to be overwritten, copies back old values of what was changed
  in its place (:mod:`~pipeline.buffer.transitions.shared.undo`), and computes all else from the rows.
"""
