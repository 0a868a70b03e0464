"""wm: train, compare and take apart world models for reinforcement learning."""

__version__ = "0.1.0"
