"""Experience: what was played, on disk (segments) and in memory, and how training windows are drawn from it.

The time convention, once: `action[t]` was taken after seeing `observation[t]`; `reward[t]`, `terminated[t]` and
`truncated[t]` came of it. `first[t]`: `observation[t]` opens an episode. The frame that follows the last action of an
episode is not kept. An episode may end with neither flag where its environment failed or could not be restored; in
memory it is truncated.
"""

from __future__ import annotations

from wmcli.experience.frequency import FrequencySampler
from wmcli.experience.replay import Episodes, Replay
from wmcli.experience.sampler import StreamSampler, Windows, WindowSampler
from wmcli.experience.segment import Recorder, read_frames, read_segment, segment_about, write_segment
from wmcli.experience.targets import SearchTargets

__all__ = [
    "Episodes",
    "FrequencySampler",
    "Replay",
    "Recorder",
    "SearchTargets",
    "StreamSampler",
    "WindowSampler",
    "Windows",
    "read_frames",
    "read_segment",
    "segment_about",
    "write_segment",
]
