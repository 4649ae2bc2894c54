"""Hugging Face transformers: the Flax models, randomly initialised, dropout on."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .data import labels, normal, tokens
from .registry import Model, model

NEEDS = "transformers", "flax"
SMALL = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def make(cls: str, config: str, apply: Any, batch: Any, **options: Any) -> Model:
    """A model class of the library with a small configuration. `apply(module, params, batch)` is its loss."""
    import transformers

    settings = getattr(transformers, config)(**options)

    @functools.cache
    def made(dtype: Any) -> Any:
        return getattr(transformers, cls)(settings, dtype=dtype, _do_init=False)

    def loss_of(dtype: Any) -> Any:
        return lambda params, state, batch: (apply(made(dtype), params, batch), state)

    wide = made(jnp.dtype(jnp.float32))
    params = jax.jit(lambda key: wide.init_weights(key, wide.input_shape))(jax.random.key(0))
    return Model(loss_of(jnp.dtype(jnp.float32)), params, batch, own=loss_of)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """As the library's own training scripts have it."""
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, logits.shape[-1])).mean()


@model("transformers", "BERT", *NEEDS, quick=True)
def bert() -> Model:
    def apply(made: Any, params: Any, batch: Any) -> jax.Array:
        ids, labels, key = batch
        logits = made(ids, params=params, dropout_rng=key, train=True).logits
        return cross_entropy(logits, labels)

    batch = tokens(0, 4, 64), tokens(1, 4, 64), jax.random.key(2)
    return make("FlaxBertForMaskedLM", "BertConfig", apply, batch, **SMALL, intermediate_size=256)


def next_token(made: Any, params: Any, batch: Any) -> jax.Array:
    ids, key = batch
    logits = made(ids, params=params, dropout_rng=key, train=True).logits
    return cross_entropy(logits[:, :-1], ids[:, 1:])


@model("transformers", "GPT-2", *NEEDS, quick=True)
def gpt2() -> Model:
    sizes = {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    return make("FlaxGPT2LMHeadModel", "GPT2Config", next_token, (tokens(0, 4, 64), jax.random.key(2)), **sizes, **ends)


@model("transformers", "Llama", *NEEDS)
def llama() -> Model:
    sizes = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 192, "max_position_embeddings": 64}
    return make("FlaxLlamaForCausalLM", "LlamaConfig", next_token, (tokens(0, 4, 64), jax.random.key(2)), **sizes)


@model("transformers", "T5", *NEEDS)
def t5() -> Model:
    from transformers.models.t5 import modeling_flax_t5 as file

    class OldNames:  # jax 0.10 has no `jnp.clip(x, a_max=...)` any more
        clip = staticmethod(lambda x, a_max: jnp.minimum(x, a_max))
        __getattr__ = staticmethod(functools.partial(getattr, jnp))

    file.jnp = OldNames()

    def apply(made: Any, params: Any, batch: Any) -> jax.Array:
        ids, decoder_ids, labels, key = batch
        logits = made(ids, decoder_input_ids=decoder_ids, params=params, dropout_rng=key, train=True).logits
        return cross_entropy(logits, labels)

    sizes = {"vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 256, "num_layers": 2, "num_heads": 4}
    batch = tokens(0, 4, 64), tokens(1, 4, 64), tokens(2, 4, 64), jax.random.key(3)
    return make("FlaxT5ForConditionalGeneration", "T5Config", apply, batch, **sizes, decoder_start_token_id=0)


@model("transformers", "ViT", *NEEDS)
def vit() -> Model:
    def apply(made: Any, params: Any, batch: Any) -> jax.Array:
        images, labels, key = batch
        return cross_entropy(made(images, params=params, dropout_rng=key, train=True).logits, labels)

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    batch = normal(0, 8, 3, 32, 32), labels(1, 8), jax.random.key(2)
    options = {**sizes, "image_size": 32, "patch_size": 4, "num_labels": 10, "hidden_dropout_prob": 0.1}
    return make("FlaxViTForImageClassification", "ViTConfig", apply, batch, **options)


@model("transformers", "CLIP", *NEEDS)
def clip() -> Model:
    def apply(made: Any, params: Any, batch: Any) -> jax.Array:
        ids, images, key = batch
        logits = made(ids, images, params=params, dropout_rng=key, train=True).logits_per_image
        labels = jnp.arange(len(logits))
        return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    text = {**sizes, "vocab_size": 256, "max_position_embeddings": 64, "eos_token_id": 1, "bos_token_id": 0}
    batch = tokens(0, 8, 64), normal(1, 8, 3, 32, 32), jax.random.key(2)
    vision = {**sizes, "image_size": 32, "patch_size": 4}
    return make("FlaxCLIPModel", "CLIPConfig", apply, batch, text_config=text, vision_config=vision, projection_dim=64)


@model("transformers", "Whisper", *NEEDS)
def whisper() -> Model:
    def apply(made: Any, params: Any, batch: Any) -> jax.Array:
        features, ids, labels, key = batch
        logits = made(features, decoder_input_ids=ids, params=params, dropout_rng=key, train=True).logits
        return cross_entropy(logits, labels)

    sizes = {"vocab_size": 256, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 16}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256}
    ends = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 1}
    places = {"max_source_positions": 64, "max_target_positions": 64, "dropout": 0.1}
    batch = normal(0, 4, 16, 128), tokens(1, 4, 64), tokens(2, 4, 64), jax.random.key(3)
    options = {**sizes, **heads, **ends, **places, "begin_suppress_tokens": None, "suppress_tokens": None}
    return make("FlaxWhisperForConditionalGeneration", "WhisperConfig", apply, batch, **options)
