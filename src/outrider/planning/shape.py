"""The shape of a decoder-only model and how many parameters it has."""

from dataclasses import dataclass

from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Numbers of a model's config.json. d is ``width``, f ``mlp_width``, H ``num_heads``, K ``num_kv_heads``,
    D ``head_size``, V ``vocabulary``, L ``num_layers``.

    ``num_norms``: RMS norms per layer over d; ``has_head_norms``: one over D for queries and one for keys
    (Qwen3). Biases: of queries, keys and values; of the output projection; of the MLP's three matrices.
    ``longest``: positions of the model (None where its file names none).
    """

    name: str
    family: str
    num_layers: int
    width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocabulary: int
    is_tied: bool
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_head_norms: bool = False
    num_norms: int = 2
    longest: int | None = None

    @property
    def attention_width(self) -> int:
        """H D: queries of all heads."""
        return self.num_heads * self.head_size

    @property
    def kv_width(self) -> int:
        """K D: keys of all key-value heads."""
        return self.num_kv_heads * self.head_size

    @property
    def layer_parameters(self) -> int:
        """P_layer: attention, gated MLP, norms and biases of one layer."""
        d, f, a, k = self.width, self.mlp_width, self.attention_width, self.kv_width
        matrices = d * a + 2 * d * k + a * d + 3 * d * f
        biases = (a + 2 * k) * self.has_qkv_bias + d * self.has_output_bias + (2 * f + d) * self.has_mlp_bias
        return matrices + biases + self.num_norms * d + 2 * self.head_size * self.has_head_norms

    def adapter_parameters(self, rank: int, targets: tuple[str, ...]) -> int:
        """Parameters of LoRA adapters: ``r (inputs + outputs)`` of each targeted matrix of each layer.

        Raises ConfigError for a name that is no matrix of these families.
        """
        d, f, a, k = self.width, self.mlp_width, self.attention_width, self.kv_width
        sizes = {
            "q_proj": d + a, "k_proj": d + k, "v_proj": d + k, "o_proj": a + d,
            "gate_proj": d + f, "up_proj": d + f, "down_proj": f + d,
        }  # fmt: skip
        names = tuple(sizes) if targets == ("all-linear",) else targets
        if unknown := [name for name in names if name not in sizes and name != "lm_head"]:
            raise ConfigError(
                f"plan cannot count adapters of {', '.join(unknown)} (model.lora.target_modules); "
                f"it counts {', '.join(sizes)}, lm_head and all-linear"
            )
        layer_adapters = rank * self.num_layers * sum(sizes[name] for name in names if name in sizes)
        return layer_adapters + rank * (d + self.vocabulary) * ("lm_head" in names)

    @property
    def embedding_parameters(self) -> int:
        """V d: the embedding, and once more a vocabulary projection that is not tied to it."""
        return self.vocabulary * self.width

    @property
    def root_parameters(self) -> int:
        """P_root: embedding, vocabulary projection and last norm, which FSDP2 gathers as one group."""
        return self.embedding_parameters * (1 if self.is_tied else 2) + self.width

    @property
    def num_parameters(self) -> int:
        """P: all of them; a tied matrix counts once."""
        return self.root_parameters + self.num_layers * self.layer_parameters
