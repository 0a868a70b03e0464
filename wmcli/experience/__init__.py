"""Experience on disk (segments) and in memory (the replay), and the sampling of training windows.

Time convention: `action[t]` follows `observation[t]`; `reward[t]`, `terminated[t]` and `truncated[t]` follow
`action[t]`. `first[t]` marks the first observation of an episode. The observation after the last action of an episode
is not stored. An episode whose environment failed may end with neither flag; the replay marks it as truncated.
"""

from __future__ import annotations

from wmcli.experience.frequency import FrequencySampler
from wmcli.experience.priority import PrioritySampler
from wmcli.experience.replay import Episodes, Replay
from wmcli.experience.sampler import StreamSampler, Windows, WindowSampler, WindowTable
from wmcli.experience.segment import Recorder, read_frames, read_segment, segment_about, write_segment
from wmcli.experience.targets import SearchTargets

__all__ = [
    "Episodes",
    "FrequencySampler",
    "PrioritySampler",
    "Replay",
    "Recorder",
    "SearchTargets",
    "StreamSampler",
    "WindowSampler",
    "WindowTable",
    "Windows",
    "read_frames",
    "read_segment",
    "segment_about",
    "write_segment",
]
