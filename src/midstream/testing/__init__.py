"""Fakes and contract suites, for your tests and ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from midstream.lazy_names import lazy_names

if TYPE_CHECKING:
    from midstream.testing.fake_worlds import Crashed as Crashed
    from midstream.testing.fake_worlds import FakeWorld as FakeWorld
    from midstream.testing.fake_worlds import KillingWorld as KillingWorld
    from midstream.testing.pool_contract import PoolContract as PoolContract
    from midstream.testing.pool_contract import PoolPeer as PoolPeer
    from midstream.testing.scripted_model import Gate as Gate
    from midstream.testing.scripted_model import Pause as Pause
    from midstream.testing.scripted_model import ScriptedModel as ScriptedModel
    from midstream.testing.scripted_model import Stall as Stall
    from midstream.testing.scripted_model import calls as calls
    from midstream.testing.scripted_model import text as text
    from midstream.testing.scripted_upstream import ScriptedUpstream as ScriptedUpstream
    from midstream.testing.store_contract import StoreContract as StoreContract
    from midstream.testing.store_fakes import FailingStore as FailingStore
    from midstream.testing.turns import records_until_end as records_until_end
    from midstream.testing.turns import run_turn as run_turn
    from midstream.testing.upstream_contract import PeerMessage as PeerMessage
    from midstream.testing.upstream_contract import Trait as Trait
    from midstream.testing.upstream_contract import UpstreamContract as UpstreamContract
    from midstream.testing.upstream_contract import UpstreamPeer as UpstreamPeer

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "testing.pool_contract": "PoolContract PoolPeer",
        "testing.scripted_model": "Gate Pause ScriptedModel Stall calls text",
        "testing.scripted_upstream": "ScriptedUpstream",
        "testing.store_contract": "StoreContract",
        "testing.store_fakes": "FailingStore",
        "testing.turns": "records_until_end run_turn",
        "testing.upstream_contract": "PeerMessage Trait UpstreamContract UpstreamPeer",
        "testing.fake_worlds": "Crashed FakeWorld KillingWorld",
    },
)
