"""Tokenizers, which encode frames to latents and decode latents to frames."""

from wmcli.tokenizers.vq import TokenizerSettings, VQTokenizer, perceptual_in_use

__all__ = ["TokenizerSettings", "VQTokenizer", "perceptual_in_use"]
