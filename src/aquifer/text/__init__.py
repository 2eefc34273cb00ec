"""Text at either end of the engine: prompts to token ids, token ids to completions."""

from aquifer.text.output import Delta, Detokenizer, OutputBuilder, StopStrings
from aquifer.text.tokenizer import Tokenizer

__all__ = ["Delta", "Detokenizer", "OutputBuilder", "StopStrings", "Tokenizer"]
