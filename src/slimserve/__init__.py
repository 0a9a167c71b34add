"""SlimServe: a slim, profile-driven LLM inference engine."""

__version__ = "0.1.0"
