"""Errors of users, each with an exit code for scripts.

Every message is one line with the fault, its place, and the next command. Any other exception is a defect of ours and
ends with exit code 1.
"""


class WmError(Exception):
    """An error that a user can cause or correct. The `wm` command ends with its `exit_code`."""

    exit_code = 1


class UsageError(WmError):
    """Wrong command line or settings."""

    exit_code = 2


class EnvironmentFault(UsageError):
    """An environment raised an exception or returned wrong values."""


class ArtifactError(WmError):
    """An artifact is missing, damaged or incompatible."""

    exit_code = 3


class LaterVersionError(ArtifactError):
    """A later version of wm wrote an artifact."""


class BusyError(WmError):
    """Another process holds the lock that this command needs."""

    exit_code = 4


class DivergedError(WmError):
    """Training produced NaN or infinity."""

    exit_code = 5


class MachineError(WmError):
    """A limit of the machine: memory, disk, permissions of a folder."""

    exit_code = 6


class Stopped(WmError):
    """Stopped after a checkpoint; the same command resumes it."""

    exit_code = 75
