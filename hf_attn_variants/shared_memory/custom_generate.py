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

    There are two cases. If the custom method is an argument of `generate`, `GenerationMixin.generate` calls it with
    all of its own parameters. The overridden `generate` of a model such as Whisper has then already prepared the
    inputs and must not run again. If the folder of the custom method also contains the model, `model.generate` is the
    custom method. It then receives only the arguments that the user passed.
    """
    names = inspect.signature(GenerationMixin.generate).parameters.keys() - {"self", "kwargs", "custom_generate"}
    return GenerationMixin.generate if names <= kwargs.keys() else type(model).generate
