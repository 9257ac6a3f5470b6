"""dflashdist trains DFlash drafters: block-diffusion models for speculative decoding."""

__version__ = "0.1.0"
