"""The contract of stores, as tests: an engine passes when its subclass of ``StoreContract`` does.

::

    class TestMyStore(StoreContract):
        @pytest.fixture(autouse=True)
        def _database(self, my_url: str) -> None:
            self.url = my_url

        def make_store(self, clock: Clock) -> Store:
            return MyStore(self.url, clock=clock)

Each test gets an empty database; ``make_store`` called twice gives two stores on it, not yet open.
Tests of features that a store does not declare in its ``Capabilities`` are skipped.
"""

from onefold.testing.contracts.bench import Bench, scenario
from onefold.testing.contracts.claiming import ClaimContract
from onefold.testing.contracts.concluding import ConcludeContract
from onefold.testing.contracts.concurrency import ConcurrencyContract
from onefold.testing.contracts.gates import GateContract
from onefold.testing.contracts.journal import JournalContract
from onefold.testing.contracts.keys import KeyContract
from onefold.testing.contracts.operating import OperatorContract
from onefold.testing.contracts.parking import ParkContract
from onefold.testing.contracts.purging import PurgeContract
from onefold.testing.contracts.putting import PutContract
from onefold.testing.contracts.reporting import ReportContract
from onefold.testing.contracts.settling import SettleContract
from onefold.testing.contracts.supervising import SuperviseContract
from onefold.testing.contracts.transactions import TransactionContract

__all__ = ["Bench", "StoreContract", "scenario"]


class StoreContract(
    PutContract,
    KeyContract,
    ClaimContract,
    SettleContract,
    ReportContract,
    OperatorContract,
    PurgeContract,
    TransactionContract,
    ConcludeContract,
    SuperviseContract,
    JournalContract,
    ParkContract,
    GateContract,
    ConcurrencyContract,
):
    """The whole contract."""
