"""The shape of a dense decoder and its exact number of parameters, from config.json alone. Torch-free.

Shape letters: V vocabulary, D model width, L layers, N query heads, M key/value heads, H head size, F feed-forward
width.
"""

from dataclasses import dataclass
from typing import Any

from plait.models.folder import model_folder, read_json

DENSE = ("qwen3", "qwen2", "llama", "mistral")
"""`model_type` of the architectures whose layers are attention (q, k, v, o) and a gated feed-forward part."""


class UnknownShapeError(ValueError):
    """The parameters of this model cannot be counted from its config.json; the message says why."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a dense decoder.

    has_qk_norm: queries and keys are normalised per head (Qwen3). num_attention_biases, num_mlp_biases: numbers in
    the bias vectors of one layer.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    is_tied: bool
    has_qk_norm: bool
    num_attention_biases: int = 0
    num_mlp_biases: int = 0

    @property
    def query_width(self) -> int:
        """N H."""
        return self.num_heads * self.head_size

    @property
    def kv_width(self) -> int:
        """M H."""
        return self.num_kv_heads * self.head_size

    @property
    def num_matrix_parameters_per_layer(self) -> int:
        """2 D N H (queries, output) + 2 D M H (keys, values) + 3 D F (gate, up, down)."""
        return self.hidden_size * (2 * self.query_width + 2 * self.kv_width + 3 * self.intermediate_size)

    @property
    def num_vector_parameters_per_layer(self) -> int:
        """2 D (norms) + 2 H (norms of queries and keys, if any) + biases."""
        qk_norm = 2 * self.head_size if self.has_qk_norm else 0
        return 2 * self.hidden_size + qk_norm + self.num_attention_biases + self.num_mlp_biases

    @property
    def num_embedding_parameters(self) -> int:
        """V D, twice where the head has weights of its own."""
        return self.vocab_size * self.hidden_size * (1 if self.is_tied else 2)

    @property
    def num_hidden_matrix_parameters(self) -> int:
        """Of the matrices between embedding and head: what Muon takes."""
        return self.num_layers * self.num_matrix_parameters_per_layer

    @property
    def num_parameters(self) -> int:
        """All: embeddings, layers, and the last norm's D."""
        layers = self.num_layers * (self.num_matrix_parameters_per_layer + self.num_vector_parameters_per_layer)
        return self.num_embedding_parameters + layers + self.hidden_size


def read_model_shape(path: str) -> ModelShape:
    """The shape of a model folder. Raises UnknownShapeError, or ModelFolderError where the file cannot be read."""
    return shape_of(read_json(model_folder(path) / "config.json"))


def shape_of(config: dict[str, Any]) -> ModelShape:
    """The shape that a config.json describes. Raises UnknownShapeError."""
    kind = config.get("model_type")
    if kind not in DENSE:
        raise UnknownShapeError(f"its architecture is {kind or 'not named'}, and {', '.join(DENSE)} are known")
    sizes = {
        name: _size(config, name)
        for name in (
            *("vocab_size", "hidden_size", "num_hidden_layers"),
            *("num_attention_heads", "num_key_value_heads", "intermediate_size"),
        )
    }
    head = _head_size(config)
    query, keys = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    # Qwen2 always has biases on queries, keys and values; the others on all four projections, if asked for.
    attention_biases = query + 2 * keys if kind == "qwen2" else 0
    if kind in ("qwen3", "llama") and _is_on(config, "attention_bias"):
        attention_biases = query + 2 * keys + sizes["hidden_size"]
    mlp_biases = 0
    if kind == "llama" and _is_on(config, "mlp_bias"):
        mlp_biases = 2 * sizes["intermediate_size"] + sizes["hidden_size"]
    return ModelShape(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        num_layers=sizes["num_hidden_layers"],
        num_heads=sizes["num_attention_heads"],
        num_kv_heads=sizes["num_key_value_heads"],
        head_size=head,
        intermediate_size=sizes["intermediate_size"],
        is_tied=_is_on(config, "tie_word_embeddings"),
        has_qk_norm=kind == "qwen3",
        num_attention_biases=attention_biases,
        num_mlp_biases=mlp_biases,
    )


@dataclass(frozen=True, slots=True)
class KVSizes:
    """What one token's keys and values take: num_layers x 2 x kv_width numbers; of any model that keeps them per layer.

    kv_width: M H.
    """

    num_layers: int
    kv_width: int


def read_kv_sizes(path: str) -> KVSizes:
    """Of a model folder, dense or not. Raises UnknownShapeError, or ModelFolderError where the file cannot be read."""
    config = read_json(model_folder(path) / "config.json")
    return KVSizes(_size(config, "num_hidden_layers"), _size(config, "num_key_value_heads") * _head_size(config))


def _head_size(config: dict[str, Any]) -> int:
    if "head_dim" in config and config["head_dim"] is not None:
        return _size(config, "head_dim")
    if config.get("model_type") == "qwen3":
        return 128  # transformers' own default for this architecture
    return _size(config, "hidden_size") // _size(config, "num_attention_heads")


def _size(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnknownShapeError(f"its config.json has no whole number for {name}")
    return value


def _is_on(config: dict[str, Any], name: str) -> bool:
    """Every one of these switches is off where config.json does not name it (transformers' defaults)."""
    return name in config and config[name] is True
