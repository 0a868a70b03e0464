"""wm: train, compare and take apart world models for reinforcement learning."""

__version__ = "0.2.0"
