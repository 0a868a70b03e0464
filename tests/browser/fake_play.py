"""A session of `wm play` without models: a square that moves, copies of it that drift, and made-up policies and trees.

Run as a program, it serves the page: python tests/browser/fake_play.py [discrete|atari|categories|continuous] [PORT]
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import numpy as np

from wmcli.browser.page import page
from wmcli.browser.server import Message, Session, serve
from wmcli.errors import UsageError
from wmcli.progress import Progress

HEIGHT, WIDTH, SIDE = 48, 64, 6
KINDS: dict[str, dict[str, Any]] = {
    "discrete": {"kind": "discrete", "names": ["STAY", "NORTH", "EAST", "SOUTH", "WEST", "TOGGLE"]},
    "atari": {
        "kind": "discrete",
        "names": [
            *("NOOP", "FIRE", "UP", "RIGHT", "LEFT", "DOWN", "UPRIGHT", "UPLEFT", "DOWNRIGHT", "DOWNLEFT", "UPFIRE"),
            *("RIGHTFIRE", "LEFTFIRE", "DOWNFIRE", "UPRIGHTFIRE", "UPLEFTFIRE", "DOWNRIGHTFIRE", "DOWNLEFTFIRE"),
        ],
    },
    "categories": {"kind": "categories", "sizes": [3, 3, 2]},
    "continuous": {"kind": "continuous", "low": [-1.0, -2.0, 0.0], "high": [1.0, 2.0, 1.0]},
}
MOVES = {"NORTH": (-1, 0), "UP": (-1, 0), "SOUTH": (1, 0), "DOWN": (1, 0), "WEST": (0, -1), "LEFT": (0, -1)}
MOVES |= {"EAST": (0, 1), "RIGHT": (0, 1)}


class FakePlay:
    """Plays on its own with the actor "agent", and keeps every state, so that it can go back."""

    def __init__(self, kind: str = "discrete") -> None:
        self.actions = KINDS[kind]
        self.rate = 30.0
        self.received: list[dict[str, Any]] = []
        self.options: dict[str, Any] = {"horizon": 0, "temperature": 1.0, "rate": 15, "mode": "realtime"}
        self.playing, self.actor, self.recording, self.echo = False, "you", None, None
        self.dirty = False
        self.held: Any = None
        self.once: list[tuple[Any, int | None]] = []
        self.held_id: int | None = None
        self.ahead: list[dict[str, Any]] = []  # states after the one that was gone back to
        self.state: dict[str, Any] = {}
        self.past: list[dict[str, Any]] = []
        self.next_pane = 2
        self._restart()

    def hello(self) -> Message:
        view = self._view()
        head = {
            "type": "hello",
            "title": "runs/fake",
            "environment": "wm/Fake-v0",
            "actions": self.actions,
            "models": [
                {"name": "controller/v3", "about": "REM, RetNet", "decodes": True, "searches": False, "acts": True},
                {"name": "muzero/v1", "about": "MuZero", "decodes": False, "searches": True, "acts": True},
            ],
            "episodes": [
                {
                    "number": n,
                    "frames": 40 + 7 * n,
                    "return": float(n % 5) - 1.5,
                    "source": ["collected", "test"][n % 2],
                }
                for n in range(60)
            ],
            "most_panes": 4,
            "view": view.head,
            "actors": ["you", "agent", "dreamer", "random"],
            "idle": {"discrete": 0, "categories": [0, 0, 0], "continuous": [0.0, 0.0, 0.5]}[self.actions["kind"]],
        }
        return Message(head, view.frames)

    def receive(self, request: dict[str, Any]) -> Message | None:
        self.received.append(request)
        if request.get("do") != "act":
            self.echo = request.get("id")
        answer = getattr(self, f"_do_{request.get('do')}", None)
        if answer is None:
            raise UsageError(f"there is nothing to do called {request.get('do')!r}.")
        self.dirty = True
        return answer(request) or self._view()

    def advance(self) -> Message | None:
        self.rate = float(self.options["rate"])
        if self.playing and self.options["mode"] == "realtime":
            self._step()
            self.dirty = True
        if not self.dirty:
            return None
        self.dirty = False
        return self._view()

    def close(self) -> str | None:
        return "the fake session is closed"

    # -- requests

    def _do_act(self, request: dict[str, Any]) -> None:
        if request["hold"] or request["action"] is None:
            if request["action"] is None and self.held is not None and self.held_id is not None:  # no step was made yet
                self.once.append((self.held, self.held_id))
            self.held, self.held_id = request["action"], request["id"]
        else:
            self.once.append((request["action"], request["id"]))
            if self.options["mode"] == "turns":
                self._step()

    def _do_play(self, request: dict[str, Any]) -> None:
        self.playing = True

    def _do_pause(self, request: dict[str, Any]) -> None:
        self.playing = False

    def _do_step(self, request: dict[str, Any]) -> None:
        self._step()

    def _do_back(self, request: dict[str, Any]) -> Message:
        return self._go(max(self.state["time"] - request["steps"], 0))

    def _do_goto(self, request: dict[str, Any]) -> Message:
        return self._go(request["time"])

    def _go(self, time: int) -> Message:
        states = [*self.past, self.state, *self.ahead]
        self.past, self.state, self.ahead = states[:time], states[time], states[time + 1 :]
        self.playing = False
        return self._history()

    def _history(self) -> Message:
        past = [*self.past, self.state]
        rewards = [each["reward"] for each in past]
        values = [2 + float(np.sin(each["time"] / 9)) for each in past]
        head = {"type": "history", "pane": 0, "from": 0, "reward": rewards, "value": values}
        return Message({**head, "entropy": [None] * len(past), "error": [None] * len(past)})

    def _do_actor(self, request: dict[str, Any]) -> None:
        if request["pane"] is None:
            self.actor = request["actor"]
        else:
            self._pane(request)["actor"] = request["actor"]

    def _do_branch(self, request: dict[str, Any]) -> None:
        if len(self.state["panes"]) == 4:
            raise UsageError("four dreams are the most; close one.")
        twin = copy.deepcopy(self._pane(request))
        twin.update(id=self.next_pane, actor="you")
        self.next_pane += 1
        self.actor = "dreamer"
        self.state["panes"].append(twin)

    def _do_close(self, request: dict[str, Any]) -> None:
        self.state["panes"].remove(self._pane(request))

    def _do_wake(self, request: dict[str, Any]) -> None:
        for pane in self.state["panes"]:
            if request["pane"] in (None, pane["id"]):
                pane.update(at=list(self.state["at"]), age=0)

    def _do_options(self, request: dict[str, Any]) -> None:
        self.options |= {key: value for key, value in request.items() if key not in ("do", "id")}

    def _do_restart(self, request: dict[str, Any]) -> None:
        self._restart()

    def _do_start(self, request: dict[str, Any]) -> None:
        self._restart()
        self.state["frame"] = request["frame"]

    def _do_record(self, request: dict[str, Any]) -> Message | None:
        steps = self.recording["steps"] if self.recording else 0
        self.recording = {"steps": 0} if request["on"] else None
        if request["on"]:
            return None
        command = "wm train-dynamics --run runs/fake --experience human/v1"
        return Message(
            {"type": "recorded", "artifact": "runs/fake/human/v1", "steps": steps, "episodes": 1, "command": command}
        )

    # -- the game

    def _restart(self) -> None:
        self.past, self.ahead = [], []
        kinds = [0, 1] if self.next_pane == 2 else [0]
        panes = [{"id": i, "model": i, "actor": "main", "at": [20, 28], "age": 0, "return": 0.0} for i in kinds]
        self.state = {"time": 0, "at": [20, 28], "reward": 0.0, "return": 0.0, "action": None, "panes": panes}

    def _pane(self, request: dict[str, Any]) -> dict[str, Any]:
        for pane in self.state["panes"]:
            if pane["id"] == request["pane"]:
                return pane
        raise UsageError(f"there is no dream {request['pane']}.")

    def _step(self) -> None:
        self.past.append(copy.deepcopy(self.state))
        self.ahead = []
        state = self.state
        if self.once:
            yours, request = self.once.pop(0)
        else:
            yours, request, self.held_id = self.held, self.held_id, None
        self.echo = request if request is not None else self.echo
        state["time"] += 1
        script = state["time"] // 10 % len(self.actions.get("names", [0]))
        main = yours if self.actor == "you" else script if self.actions["kind"] == "discrete" else None
        state["action"] = main
        self._move(state["at"], main, 0)
        state["reward"] = float(state["time"] % 12 == 0)
        state["return"] += state["reward"]
        for pane in state["panes"]:
            action = {"main": main, "you": yours}.get(str(pane["actor"]), script)
            self._move(pane["at"], action, pane["id"] + 1)
            pane.update(age=pane["age"] + 1, action=action, **{"return": pane["return"] + state["reward"]})
        if self.recording:
            self.recording["steps"] += 1

    def _move(self, at: list[int], action: Any, drift: int) -> None:
        down = across = 0
        if isinstance(action, int):
            name = self.actions["names"][action]
            for word, (dy, dx) in MOVES.items():
                if word in name:
                    down, across = down + dy, across + dx
        elif isinstance(action, list):
            down, across = round(-action[1]), round(action[0])
        at[0] = (at[0] + down) % (HEIGHT - SIDE)
        at[1] = (at[1] + across + (drift > 0 and self.state["time"] % 16 == 0) * drift) % (WIDTH - SIDE)

    def _picture(self, at: list[int], tint: int) -> np.ndarray:
        rows, columns = np.mgrid[:HEIGHT, :WIDTH]
        frame = np.stack([rows * 2, columns * 2, 60 + 40 * ((rows // 8 + columns // 8) % 2)], -1).astype(np.uint8)
        frame[at[0] : at[0] + SIDE, at[1] : at[1] + SIDE] = (255, 220 - tint, 60 + tint)
        return frame

    def _view(self) -> Message:
        state, time = self.state, self.state["time"]
        frames = [self._picture(state["at"], 0)]
        panes = []
        count = len(self.actions.get("names", [])) or None
        for pane in state["panes"]:
            decodes = pane["model"] == 0
            if decodes:
                frames.append(self._picture(pane["at"], 60))
            generator = np.random.default_rng(time * 7 + pane["id"])
            policy = generator.dirichlet(np.full(count, 0.4)).tolist() if count else None
            panes.append(
                {
                    "id": pane["id"],
                    "model": pane["model"],
                    "actor": pane["actor"],
                    "age": pane["age"],
                    "frame": len(frames) - 1 if decodes else None,
                    "reward": state["reward"],
                    "return": pane["return"],
                    "termination": abs(np.sin(time / 20)) * 0.3,
                    "terminated": False,
                    "value": 2 + float(np.sin(time / 9)),
                    "policy": policy,
                    "action": pane.get("action"),
                    "entropy": 1 + float(np.cos(time / 13)) / 2,
                    "disagreement": 0.1 * (time % 30) / 30,
                    "error": float(np.abs(frames[0].astype(int) - frames[-1]).mean()) if decodes else None,
                    "latent": self._latent(pane, generator),
                    "search": None if decodes else self._search(generator, count or 4),
                }
            )
        real = {
            "source": "environment",
            "frame": 0,
            "reward": state["reward"],
            "return": state["return"],
            "ended": "terminated" if time and time % 100 == 0 else None,
            "action": state["action"],
            "note": None,
        }
        head = {
            "type": "view",
            "echo": self.echo,
            "time": time,
            "earliest": 0,
            "latest": time + len(self.ahead),
            "playing": self.playing,
            "fps": 15.0,
            "options": self.options,
            "actor": self.actor,
            "recording": self.recording,
            "real": real,
            "panes": panes,
        }
        return Message(head, tuple(frames))

    def _latent(self, pane: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
        if pane["model"] == 1:
            return {"kind": "numbers", "values": generator.normal(size=64).tolist()}
        if pane["id"] % 2:
            return {"kind": "classes", "shape": [16, 16], "values": generator.integers(16, size=16).tolist()}
        return {"kind": "tokens", "shape": [8, 8], "values": generator.integers(512, size=64).tolist(), "codes": 512}

    def _search(self, generator: np.random.Generator, count: int) -> dict[str, Any]:
        nodes = [[-1, -1, 120, 0.4, 1.0]]
        visits = generator.multinomial(119, generator.dirichlet(np.full(count, 0.5)))
        values = generator.uniform(-1, 1, count)
        for action in range(count):
            if visits[action]:
                nodes.append([0, action, int(visits[action]), float(values[action]), 1 / count])
        index = 1
        while index < len(nodes) and len(nodes) < 150:
            left = nodes[index][2] - 1
            while left > 0:
                part = int(generator.integers(1, left + 1))
                nodes.append([index, int(generator.integers(count)), part, float(generator.uniform(-1, 1)), 0.3])
                left -= part
            index += 1
        line, children = [0], [n for n, node in enumerate(nodes) if node[0] == 0]
        while children:
            line.append(max(children, key=lambda n: nodes[n][2]))
            children = [n for n, node in enumerate(nodes) if node[0] == line[-1]]
        return {"visits": visits.tolist(), "values": values.tolist(), "value": 0.4, "nodes": nodes, "line": line}


if __name__ == "__main__":
    kind = sys.argv[1] if len(sys.argv) > 1 else "discrete"
    port = int(sys.argv[2]) if len(sys.argv) > 2 else 8765

    def open_session() -> Session:
        return FakePlay(kind)

    serve(open_session, page("play"), host="127.0.0.1", port=port, progress=Progress(), title="fake play")
