"""Tokenizers: observation to latent and back."""

from wmcli.tokenizers.vq import TokenizerSettings, VQTokenizer, perceptual_in_use

__all__ = ["TokenizerSettings", "VQTokenizer", "perceptual_in_use"]
