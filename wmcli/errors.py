"""What can go wrong for a user, each with the exit code a script can act on.

Every message is one line that says what is wrong, where, and what to run next. Anything that is not a `WmError` is a
defect of ours and ends with exit code 1.
"""


class WmError(Exception):
    """An error a user can cause or mend. `exit_code` is what the `wm` command returns."""

    exit_code = 1


class UsageError(WmError):
    """Wrong command line or settings."""

    exit_code = 2


class EnvironmentFault(UsageError):
    """An environment raised an exception or returned what cannot be used."""


class ArtifactError(WmError):
    """An artifact is missing, damaged or incompatible."""

    exit_code = 3


class BusyError(WmError):
    """Another process holds what this command wants to write."""

    exit_code = 4


class DivergedError(WmError):
    """Training produced NaN or infinity."""

    exit_code = 5


class MachineError(WmError):
    """A limit of the machine: memory, disk, permissions of a folder."""

    exit_code = 6


class Stopped(WmError):
    """Stopped after a checkpoint; the same command goes on from there."""

    exit_code = 75
