"""Where every claimed item is."""

from pipeline.ledger.entry import BUFFERED as BUFFERED
from pipeline.ledger.entry import FINISHED as FINISHED
from pipeline.ledger.entry import GIVEN_UP as GIVEN_UP
from pipeline.ledger.entry import IN_FLIGHT as IN_FLIGHT
from pipeline.ledger.entry import LEASED as LEASED
from pipeline.ledger.entry import PARKED as PARKED
from pipeline.ledger.entry import PENDING as PENDING
from pipeline.ledger.entry import RUNNING as RUNNING
from pipeline.ledger.entry import STATES as STATES
from pipeline.ledger.entry import UNREWARDED as UNREWARDED
from pipeline.ledger.entry import WAITING as WAITING
from pipeline.ledger.entry import ConsumerHalf as ConsumerHalf
from pipeline.ledger.entry import Entry as Entry
from pipeline.ledger.entry import Lease as Lease
from pipeline.ledger.entry import TaskTotals as TaskTotals
from pipeline.ledger.ledger import Ledger as Ledger
from pipeline.ledger.recovering import recover as recover
