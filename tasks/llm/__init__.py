"""What is particular to language models: token rows for a trainer, advantages of a group, scores.

Nothing in here asks a server; that is ``tasks.chat``.
"""

from __future__ import annotations

from tasks.llm.advantages import advantages as advantages
from tasks.llm.packing import MicroBatch as MicroBatch
from tasks.llm.packing import micro_batches as micro_batches
from tasks.llm.packing import packed as packed
from tasks.llm.packing import padded as padded
from tasks.llm.rows import TokenRow as TokenRow
from tasks.llm.rows import token_rows as token_rows
from tasks.llm.scoring import Judge as Judge
from tasks.llm.scoring import Rubric as Rubric
from tasks.llm.scoring import Score as Score
from tasks.llm.scoring import Scored as Scored
