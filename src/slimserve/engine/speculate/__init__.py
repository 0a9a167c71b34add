"""Drafting: proposals that a step verifies, and whether they pay."""

from slimserve.engine.speculate.contract import Drafter, Observer, Probabilistic
from slimserve.engine.speculate.control import SpeculationControl
from slimserve.engine.speculate.lookup import PromptLookup

__all__ = ["Drafter", "Observer", "Probabilistic", "PromptLookup", "SpeculationControl"]
