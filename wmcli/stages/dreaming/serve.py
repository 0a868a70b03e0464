"""`wm play --browser`: the server of the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import torch

from wmcli.browser.page import page
from wmcli.browser.server import bind, check_installed, serve
from wmcli.progress import Progress
from wmcli.stages.context import Context
from wmcli.stages.dreaming.session import DreamSession
from wmcli.stages.dreaming.studio import open_studio


def play_in_browser(
    context: Context,
    *,
    controller: str | None,
    against: Sequence[str],
    experience: str | None,
    host: str,
    port: int,
    ready: Callable[[str], object],
) -> None:
    """Serve the page until a signal ends it.

    Args:
        context: Of the run.
        controller: See `open_studio`.
        against: See `open_studio`.
        experience: See `open_studio`.
        host: Where to listen.
        port: 0 for any free one.
        ready: Called with the address of the page, which is printed as well.

    Raises:
        UsageError: The port is taken, or the extra is not installed.
        ArtifactError: See `open_studio`.
    """
    check_installed()
    bind(host, port).close()  # before the models are loaded
    if not context.settings.training.threads:  # the browser needs a core, too
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))
    studio = open_studio(context, controller=controller, against=against, experience=experience)
    numbers = count()
    serve(
        lambda: DreamSession(studio, next(numbers)),
        page("play"),
        host=host,
        port=port,
        progress=Progress(),
        title="play",
        ready=ready,
    )
