"""Pictures on machines without a display, as servers are: pygame draws in memory, MuJoCo with EGL or OSMesa."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys

from wmcli.errors import UsageError

BACKEND = "MUJOCO_GL"
NONE = "disabled"


def prepare_pygame() -> None:
    """Let pygame draw in memory where there is no display."""
    if _without_display():
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


def prepare_mujoco() -> None:
    """Choose how MuJoCo draws where there is no display, unless it is chosen; call this before its import.

    Mesa brings an LLVM whose symbols a later import of triton would take for its own, and crash. So triton comes first.
    """
    # dm_control frees renderers of a thread of its own from the garbage collector, which can wait forever
    os.environ.setdefault("DISABLE_RENDER_THREAD_OFFLOADING", "1")
    if _without_display() and not os.environ.get(BACKEND):
        os.environ[BACKEND] = "egl" if _egl_works() else "osmesa" if _library("libOSMesa.so.8") else NONE
    if os.environ.get(BACKEND) != NONE:
        with contextlib.suppress(ImportError):
            importlib.import_module("triton")


def check_mujoco(name: str) -> None:
    """Check that MuJoCo can draw pictures. Where it cannot and tries, it ends the process.

    Args:
        name: Of the environment.

    Raises:
        UsageError: It needs a display, or a library.
    """
    backend = os.environ.get(BACKEND)
    if backend == NONE:
        raise UsageError(
            f"{name}: MuJoCo draws no pictures here ({BACKEND}={backend}): it needs a display, EGL or OSMesa; install"
            f" one (apt-get install libosmesa6), then run the same command again with {BACKEND}=osmesa, or egl"
        )
    if backend == "glfw" and _without_display():
        raise UsageError(
            f"{name}: {BACKEND}=glfw needs a display, and there is none: run the same command again with {BACKEND}=egl"
        )


def _without_display() -> bool:
    return sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _library(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _egl_works() -> bool:
    """Return whether EGL has a device: without a driver its library is there, and drawing fails."""
    egl = _library("libEGL.so.1")
    if egl is None:
        return False
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    address = egl.eglGetProcAddress(b"eglQueryDevicesEXT")
    if not address:
        return False
    query = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))(address)
    count = ctypes.c_int(0)
    return bool(query(0, None, ctypes.byref(count))) and count.value > 0
