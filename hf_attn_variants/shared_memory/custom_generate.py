"""A custom generation method for Transformers, which shares memory between beams (see `share_memory`).

`attn-variants export --to custom_generate` writes this module and the code that it uses to a single file, which runs
without this package.
"""

import inspect
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from .attention import KEYS_AND_VALUES, iterate_cross_attentions
from .installation import check_sharing_support, install_sharing, remove_sharing


def generate(model: PreTrainedModel, *args: Any, cross_cache: str = KEYS_AND_VALUES, **kwargs: Any) -> Any:
    """Generate with beams that share one cross-attention cache per sentence. The model is unchanged afterwards.

    Args:
        model: A Transformers encoder-decoder, such as T5, BART, Marian or Whisper.
        args, kwargs: The arguments of `model.generate`.
        cross_cache: "keys_and_values" to cache the keys and values of each layer, or "encoder_outputs" to cache the
            encoder outputs once for all layers, which requires less memory and more multiplications.

    Returns:
        The result of `model.generate`, with the same tokens.

    Raises:
        ValueError: If the model is not supported.

    Example:
        >>> model = AutoModelForSeq2SeqLM.from_pretrained("google-t5/t5-small")
        >>> model.generate(**inputs, num_beams=4, custom_generate="share-memory", trust_remote_code=True)
    """
    modules = dict(iterate_cross_attentions(model))
    check_sharing_support(model, modules)
    install_sharing(model, modules, cross_cache)
    try:
        return _get_original_generate(model, kwargs)(model, *args, **kwargs)
    finally:
        remove_sharing(model, modules.values())


def _get_original_generate(model: Any, kwargs: dict[str, Any]) -> Any:
    """Return a model's original `generate` function.

    `GenerationMixin.generate` passes all its parameters to a custom method. In this case, models such as Whisper,
    which override `generate`, have already prepared the inputs. If the folder also contains the model, Transformers
    sets `model.generate` to the custom method, which then only receives the arguments that the user passed.
    """
    names = inspect.signature(GenerationMixin.generate).parameters.keys() - {"self", "kwargs", "custom_generate"}
    return GenerationMixin.generate if names <= kwargs.keys() else type(model).generate
