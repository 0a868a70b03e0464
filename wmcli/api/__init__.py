"""The public Python API. `import wmcli` gives these names without importing torch before one is used.

    run = wmcli.open_run("runs/x")
    model = run.dynamics()
    state = model.observe(frames, actions)
    step, state = model.imagine(state, action)

Artifacts are verified when they are loaded, and their models are frozen. Training here needs no run directory.

B batch, E environments side by side, N rows of experience, T time (frames), H W C image. Frames are uint8, actions
int64 from 0; NumPy arrays and tensors of any device are accepted, and tensors on the model's device are returned. The
convention of time is that of `wmcli.experience`.
"""

from wmcli.api.evaluation import EpisodeScores, evaluate
from wmcli.api.experience import Experience, Rows
from wmcli.api.models import ControllerModel, DynamicsModel, OpenLoop, Player, TokenizerModel
from wmcli.api.runs import OpenedRun, load, load_settings, open_run
from wmcli.api.training import train_controller, train_dynamics, train_tokenizer

__all__ = [
    "ControllerModel",
    "DynamicsModel",
    "EpisodeScores",
    "Experience",
    "OpenLoop",
    "OpenedRun",
    "Player",
    "Rows",
    "TokenizerModel",
    "evaluate",
    "load",
    "load_settings",
    "open_run",
    "train_controller",
    "train_dynamics",
    "train_tokenizer",
]
