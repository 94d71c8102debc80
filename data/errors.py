"""A person's mistakes, as the trainer's own `UserError`.

Importing `train_gpt2` imports torch (seconds), so the class is fetched only on the way to an error: `python
-m data` starts at once, and tokenizer processes never load torch.
"""

from __future__ import annotations

import sys


def user_error(message: str) -> ValueError:
    """The error to raise for a person's mistake; `message` says what is wrong, where, and what to do."""
    from train_gpt2 import UserError

    return UserError(message)


def is_user_error(error: BaseException) -> bool:
    """Whether `error` came from `user_error`: one line for the person instead of a traceback."""
    trainer = sys.modules.get("train_gpt2")  # not loaded: nobody can have raised one
    return trainer is not None and isinstance(error, trainer.UserError)
