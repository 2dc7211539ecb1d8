"""Where finished groups wait."""

from pipeline.buffer.batch import Batch as Batch
from pipeline.buffer.batch import Group as Group
from pipeline.buffer.buffer import GroupBuffer as GroupBuffer
from pipeline.buffer.mixed import MixedBuffer as MixedBuffer
