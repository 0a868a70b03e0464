"""The registry of evaluation protocols."""

from __future__ import annotations

from wmcli.stages.evaluate import RETURNS
from wmcli.stages.grid_world import GRID_WORLD
from wmcli.stages.held_out import HELD_OUT
from wmcli.stages.memory_tasks import MEASURES
from wmcli.stages.protocol import Protocol
from wmcli.stages.training_games import TRAINING

PROTOCOLS: dict[str, Protocol] = {
    protocol.name: protocol for protocol in (RETURNS, TRAINING, GRID_WORLD, HELD_OUT, *MEASURES)
}
