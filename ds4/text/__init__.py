"""Text to tokens and back, for DeepSeek-V4. Knows no model internals and no device."""

from ds4.text.chat import ChatPrompt, Thinking
from ds4.text.detokenizer import Detokenizer
from ds4.text.messages import Message
from ds4.text.tokenizer import Tokenizer

__all__ = ["ChatPrompt", "Detokenizer", "Message", "Thinking", "Tokenizer"]
