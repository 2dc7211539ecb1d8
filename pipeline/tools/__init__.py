"""Functions for people who keep replay data; the commands of :mod:`pipeline.cli` are thin over them. They read
manifests, journals and segments, start no engine, take no lock of what they read, and change nothing of it."""

from pipeline.tools.following import follow as follow
from pipeline.tools.inspecting import Inspected as Inspected
from pipeline.tools.inspecting import inspect as inspect
from pipeline.tools.made import Made as Made
from pipeline.tools.merging import merge as merge
from pipeline.tools.one_item import Shown as Shown
from pipeline.tools.one_item import show_item as show_item
from pipeline.tools.resharding import reshard as reshard
from pipeline.tools.salvaging import SalvagedRows as SalvagedRows
from pipeline.tools.salvaging import salvage_run as salvage_run
from pipeline.tools.salvaging_episodes import SalvagedEpisodes as SalvagedEpisodes
from pipeline.tools.sampling import Sampled as Sampled
from pipeline.tools.sampling import sample_run as sample_run
from pipeline.tools.splitting import split as split
