"""Encoder-decoders: the encoder reads a source once, the decoder is decoded as any other model."""
