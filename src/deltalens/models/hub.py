"""Asking the Hugging Face Hub once, briefly, whether a model is there, before anything retries for half a minute."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deltalens.errors import ModelError

#: Any of these files means that a tokenizer comes with a model.
TOKENIZER_FILES = frozenset(("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt"))
_SECONDS = 15.0


@dataclass(frozen=True)
class HubModel:
    """A model that exists on the Hub or in its local cache.

    Attributes:
        name: Of the repository.
        revision: The commit.
        only_cached: The Hub can't be reached, but the files are here.
        has_tokenizer: Whether a tokenizer comes with it.
    """

    name: str
    revision: str | None
    only_cached: bool
    has_tokenizer: bool


def resolve_on_hub(name: str, revision: str | None, near: list[str]) -> HubModel:
    """Find a model on the Hub, or in its cache if the Hub can't be reached.

    Args:
        name: Such as `distilgpt2` or `EleutherAI/pythia-70m`.
        revision: Branch, tag or commit; None for the main branch.
        near: Built-in and named models with a similar name, for the error.

    Returns:
        Where to read it.

    Raises:
        ModelError: No such model or revision, no access, or no connection.
    """
    from huggingface_hub import HfApi, errors, try_to_load_from_cache

    hint = f" Did you mean {' or '.join(near)}?" if near else " `deltalens models` lists those that need no Hub."
    try:
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
        info = HfApi().model_info(name, revision=revision, timeout=_SECONDS)
        files = {sibling.rfilename for sibling in info.siblings or []}
        return HubModel(name, info.sha or revision, only_cached=False, has_tokenizer=bool(files & TOKENIZER_FILES))
    except errors.HFValidationError as error:
        raise ModelError(f"{name} is neither a path nor a name on the Hub.{hint}") from error
    except errors.GatedRepoError as error:
        raise ModelError(f"{name} is gated; accept its terms on the Hub and log in with `hf auth login`.") from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{name} has no revision {revision} on the Hub.") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(f"There is no model {name}, neither here nor on the Hub.{hint}") from error
    except Exception as error:  # every transport library has its own connection errors
        if isinstance(cached, str):
            snapshot = Path(cached).parent
            files = {path.name for path in snapshot.iterdir()}
            return HubModel(name, snapshot.name, only_cached=True, has_tokenizer=bool(files & TOKENIZER_FILES))
        raise ModelError(
            f"{name} isn't here, and the Hub can't be reached ({type(error).__name__}); check the connection.{hint}"
        ) from error
