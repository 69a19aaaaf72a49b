"""Checks of a draft model's checkpoint against the served model's: it must write the same tokens."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from medha.errors import CheckpointInvalid, ConfigInvalid, MedhaError
from medha_worker.checkpoints.tokenizer_files import whole_tokenizer
from medha_worker.model.model_config import ModelConfig

FIELD = "spec.scheduling.speculation.draftModel"


def draft_config(directory: Path, model_directory: Path, config: ModelConfig) -> ModelConfig:
    """Return the configuration of a draft model, served as long sequences as the model of `config`.

    Raises:
        MedhaError: there is no checkpoint, its model is not supported, reads too few tokens, or has other tokens; the text
            names the field.
    """
    try:
        draft = ModelConfig.from_directory(directory)
        if draft.max_model_len < config.max_model_len:
            raise ConfigInvalid(
                f"it reads at most {draft.max_model_len} tokens, and spec.model.maxModelLen is "
                f"{config.max_model_len}; lower that, or choose another draft model"
            )
        _require_same_tokens(directory, draft, model_directory, config)
        return ModelConfig.from_directory(directory, config.max_model_len)
    except MedhaError as error:
        raise type(error)(f"{FIELD} ({directory}): {error}") from error


def _require_same_tokens(
    directory: Path, draft: ModelConfig, model_directory: Path, config: ModelConfig
) -> None:
    """Check that each token has the same id in both vocabularies; they may be padded to different sizes."""
    own, served = (_vocabulary(one) for one in (directory, model_directory))
    fix = "choose a draft model with the served model's tokenizer, of the same family and release"
    if own != served:
        differing = {token for token, _ in own.items() ^ served.items()}
        example = min(differing, key=lambda token: (served.get(token, len(served)), token))
        raise ConfigInvalid(
            f"its tokenizer is another one than the served model's ({len(own)} and {len(served)} tokens; "
            f"{example!r} is {own.get(example, 'not there')} and {served.get(example, 'not there')}); {fix}"
        )
    largest = max(served.values(), default=0)
    if min(draft.vocab_size, config.vocab_size) <= largest:
        raise ConfigInvalid(
            f"its vocab_size is {draft.vocab_size}, and the served model's {config.vocab_size}, but the tokenizer "
            f"has ids up to {largest}; {fix}"
        )


def _vocabulary(directory: Path) -> dict[str, int]:
    """Return the ids of a checkpoint's tokens.

    Raises:
        CheckpointInvalid: it has no tokenizer, or one that cannot be read.
    """
    if not (directory / "tokenizer.json").is_file():
        raise CheckpointInvalid(
            f"{directory / 'tokenizer.json'} is missing, so its tokens may be others than the served model's; fetch "
            "the checkpoint with its tokenizer"
        )
    whole = Tokenizer.from_buffer(whole_tokenizer(directory)["tokenizer.json"])
    return dict(whole.get_vocab(with_added_tokens=True))
