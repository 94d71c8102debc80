"""A person's mistakes, as the trainer's own `UserError`.

Importing `train_gpt2` imports torch (seconds), so the class is fetched only on the way to an error: `python
-m data` starts at once, and tokenizer workers never load torch.
"""

from __future__ import annotations


def user_error(message: str) -> ValueError:
    """The error to raise for a person's mistake; `message` says what is wrong, where, and what to do."""
    try:
        from train_gpt2 import UserError
    except ImportError:
        return ValueError(message)
    return UserError(message)


def is_user_error(error: BaseException) -> bool:
    """Whether `main` should print this as one line instead of a traceback."""
    return type(error) is type(user_error(""))
