"""Layers of a GPT model for Megatron-LM's `--spec ficco.integrations.megatron gpt_spec`.

Attention and norms are those of Transformer Engine. The linear layers are Megatron-Core's own,
which `ficco.overlap` overlaps. Megatron-LM reads `gpt_spec` from this module and does not call it.
So its import imports Megatron-Core, and reads the arguments of Megatron-LM if they are parsed.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from ficco.core.errors import InputError
from ficco.core.private.finding import resolve
from ficco.core.private.frameworks import HAVE_ENGINE, LAYER_SPEC, SPEC_PROVIDER

_INSTEAD = "use --transformer-impl local instead of --spec"
_OPTIONS = ("qk_layernorm", "multi_latent_attention", "qk_l2_norm")
_UNSUPPORTED = {
    "num_experts": "mixtures of experts",
    "fp8": "8-bit GEMMs, which are in Transformer Engine's own linear layers",
    "fp4": "4-bit GEMMs, which are in Transformer Engine's own linear layers",
}


def gpt_layer_spec(
    *,
    qk_layernorm: bool = False,
    multi_latent_attention: bool = False,
    qk_l2_norm: bool = False,
) -> Any:
    """Return the ModuleSpec of a dense transformer layer, to make a GPTModel with.

    Args:
        qk_layernorm: normalize queries and keys; in multi-latent attention what is compressed.
        multi_latent_attention: of DeepSeek's kind.
        qk_l2_norm: normalize queries and keys by their L2 norm instead.

    Raises:
        InputError: Megatron-Core or Transformer Engine is not installed.
    """
    provider = _provider()
    spec = resolve(LAYER_SPEC)(
        qk_layernorm=qk_layernorm,
        multi_latent_attention=multi_latent_attention,
        qk_l2_norm=qk_l2_norm,
    )
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = provider.layer_norm()
    attention.core_attention = provider.core_attention()
    if qk_layernorm and not qk_l2_norm:
        attention.q_layernorm = provider.layer_norm(for_qk=True)
        key = "kv_layernorm" if multi_latent_attention else "k_layernorm"
        setattr(attention, key, attention.q_layernorm)
    return spec


def _provider() -> Any:
    """Return Megatron-Core's list of Transformer Engine's modules."""
    try:
        installed = resolve(HAVE_ENGINE)
    except ImportError as error:
        raise InputError(
            f"gpt_spec: Megatron-Core cannot be imported ({error}); install megatron-core"
        ) from error
    if not installed:
        raise InputError(
            "gpt_spec: Megatron-Core finds no Transformer Engine; install "
            f"transformer-engine[pytorch], or {_INSTEAD}"
        )
    return resolve(SPEC_PROVIDER)()


def _of_arguments() -> Any:
    """Return the ModuleSpec for Megatron-LM's arguments, or for none outside of its scripts."""
    given: dict[str, Any] = {}
    if (training := sys.modules.get("megatron.training")) is not None:
        with suppress(AssertionError):  # they are not parsed
            given = vars(training.get_args())
    for name, what in _UNSUPPORTED.items():
        if given.get(name):
            raise InputError(f"gpt_spec: {name}={given[name]!r} asks for {what}; {_INSTEAD}")
    return gpt_layer_spec(**{name: given[name] for name in _OPTIONS if name in given})


gpt_spec = _of_arguments()
