"""Drafting: proposals that a step verifies, and whether they pay."""

from slimserve.engine.speculate.contract import Drafter
from slimserve.engine.speculate.control import SpeculationControl
from slimserve.engine.speculate.lookup import PromptLookup

__all__ = ["Drafter", "PromptLookup", "SpeculationControl"]
