"""Plan: counts beside transformers' own models, the design's two claims, and what more GPUs or a
longer context can do.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.algorithms.grpo import Grpo
from outrider.algorithms.losses import TokenLoss, TokenLossInputs
from outrider.api import run_settings
from outrider.cli import main
from outrider.config import validate
from outrider.engines.local.attention import IMPLEMENTATION, Segment, TreePlan, register
from outrider.engines.local.cpu_kernels import fuse
from outrider.engines.local.decode_graphs import DecodeGraphs
from outrider.errors import ConfigError, ModelError
from outrider.planning.memory import (
    Layout,
    Training,
    Workload,
    activation_bytes,
    fit,
    host_bytes,
    make_workload,
    rank_bytes,
    reserved_slots,
    smallest_fit,
)
from outrider.planning.plan import unpacked_refusal
from outrider.planning.shape import find_shape, known_models, shape_from_config
from outrider.training.adapters import choose_trained
from outrider.training.settings import LoraSettings, RunSettings

MEMORY = 80e9
WORK = Workload(
    training=Training(max_tokens=4096, checkpointed=True, has_reference=True),
    context=4096, episodes=512, shares_weights=False, extra_forwards=1,
)  # fmt: skip
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 101, "head_dim": 32, "max_position_embeddings": 64,
    "pad_token_id": 0,
}  # fmt: skip
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "smollm3", "qwen3_5_text", "gpt_oss")


def counted(config: object) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_equal_those_of_the_model(family: str, is_tied: bool, tmp_path: Path) -> None:
    config = AutoConfig.for_model(family, **SMALL, tie_word_embeddings=is_tied)
    config.save_pretrained(tmp_path)
    assert find_shape(str(tmp_path)).num_parameters == counted(config)


@pytest.mark.parametrize("name", known_models())
def test_parameters_of_known_models(name: str) -> None:
    values = dict(known_models()[name])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    assert shape_from_config(known_models()[name], name=name).num_parameters == counted(config)


def test_restarted_contexts_count_for_the_update_and_not_for_the_engine() -> None:
    base = {
        "algorithm": {"type": "grpo"},
        "environment": {"type": "webshop"},
        "rollout": {"max_turns": 5, "max_response_tokens": 2000},
    }
    kept, stripped = (
        make_workload(
            validate(RunSettings, base | {"model": {"history_thinking": history}}), prompt_tokens=1000
        )
        for history in ("keep", "strip")
    )
    assert stripped.context == kept.context == kept.episode_tokens == 3000
    assert stripped.episode_tokens == 15_000 and stripped.training.max_tokens == 4096
    assert stripped.step_tokens == 5 * kept.step_tokens
    episodes = make_workload(
        validate(RunSettings, base | {"algorithm": {"type": "lamer"}}), prompt_tokens=1000
    )
    assert (episodes.context, episodes.step_tokens) == (3000, 3 * kept.step_tokens)
    assert episodes.training.max_tokens == 9000


class OwnLoss(Grpo):
    def token_loss(self, inputs: TokenLossInputs) -> TokenLoss:
        return super().token_loss(inputs)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({"type": "grpo"}, 3000),
        ({"type": "gspo"}, 15_000),
        ({"type": "grpo", "sampler_correction": {"level": "geometric"}}, 15_000),
        ({"type": "grpo", "sampler_rejection": {"scope": "max", "statistic": "k2"}}, 15_000),
        ({"type": f"{__name__}:OwnLoss"}, 15_000),
    ],
    ids=lambda value: str(value),
)
def test_the_largest_micro_batch_is_a_context_unless_the_loss_needs_whole_rollouts(
    algorithm: dict[str, Any], expected: int
) -> None:
    recipe = {
        "algorithm": algorithm,
        "environment": {"type": "webshop"},
        "model": {"history_thinking": "strip"},
        "rollout": {"max_turns": 5, "max_response_tokens": 2000},
        "update": {"max_tokens": 100},
    }
    work = make_workload(validate(RunSettings, recipe), prompt_tokens=1000)
    assert work.unit_tokens == work.training.max_tokens == expected


def test_an_unknown_model_family_is_refused() -> None:
    with pytest.raises(ModelError, match="mamba"):
        shape_from_config({"model_type": "mamba"}, name="x")


def test_states_are_sixteen_bytes_per_parameter() -> None:
    shape = find_shape("Qwen/Qwen2.5-7B-Instruct")
    rank = rank_bytes(shape, Training(ranks=8, max_tokens=4096))
    assert sum(rank[name] for name in ("masters", "moments", "gradients")) == 2 * shape.num_parameters


def test_fits_of_7b_and_32b_models() -> None:
    seven, large = (find_shape(f"Qwen/Qwen2.5-{size}-Instruct") for size in ("7B", "32B"))
    layout = Layout(placement="colocate", trainers=8, engines=8)
    assert fit(seven, WORK, layout, gpu_memory=MEMORY).fits
    assert not fit(seven, WORK, Layout(), gpu_memory=MEMORY).fits
    found = smallest_fit(large, WORK, "disaggregate", gpu_memory=MEMORY, gpus_per_node=8)
    assert found is not None and (found.layout.trainers, found.layout.tensor_parallel) == (16, 2)
    # colocated engines of this version use one GPU each, which is too small beside the trainer
    assert smallest_fit(large, WORK, "colocate", gpu_memory=MEMORY, gpus_per_node=8) is None


@given(st.sampled_from(sorted(known_models())), st.integers(2, 64), st.booleans())
def test_more_ranks_never_need_more_memory(name: str, ranks: int, checkpointed: bool) -> None:
    shape, training = find_shape_of(name), Training(ranks=ranks, max_tokens=2048, checkpointed=checkpointed)
    more = rank_bytes(shape, replace(training, ranks=ranks + 1))
    assert sum(more.values()) <= sum(rank_bytes(shape, training).values())


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_longer_context_never_fits_more_episodes(context: int, more: int) -> None:
    layout, shape = Layout(placement="disaggregate", trainers=8), find_shape_of("Qwen/Qwen3-8B")
    short, long = (
        fit(shape, replace(WORK, context=length), layout, gpu_memory=MEMORY).episodes
        for length in (context, context + more)
    )
    assert long <= short


def find_shape_of(name: str):  # type: ignore[no-untyped-def]
    return shape_from_config(known_models()[name], name=name)


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(Path(__file__).parents[2] / "recipes" / "tool-reasoning.toml")
    assert main(["plan", recipe, "--json", "--model", "Qwen/Qwen2.5-7B-Instruct"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["fits"] and told["fewest"][0]["fits"]
    assert main(["plan", recipe, "--gpus", "8", "--model", "Qwen/Qwen2.5-7B-Instruct"]) == 0
    out = capsys.readouterr().out
    assert "7,615,616,512" in out and "(colocate)" in out
    assert main(["plan", recipe, "--gpus", "8", "--tensor-parallel", "3"]) == 2


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main(["plan", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


RECIPES = Path(__file__).parents[2] / "recipes"
REASONING = str(RECIPES / "tool-reasoning.toml")


@pytest.mark.parametrize("recipe", sorted(path.name for path in RECIPES.glob("*.toml")))
def test_every_recipe_has_a_plan(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(
        "gymnasium", reason="a recipe names a class that needs it"
    ) if "gym" in recipe else None
    plan = planned(capsys, str(RECIPES / recipe))
    assert 0 < plan["trained_parameters"] <= plan["model"]["num_parameters"] and plan["tokens_per_step"] > 0
    adapted = planned(
        capsys, str(RECIPES / recipe), "model.trained_layers=none", "model.lora={rank=4}", "--device", "H100"
    )
    assert adapted["trained_parameters"] < plan["trained_parameters"]
    assert adapted["fits"]


def test_vllm_uses_its_share_of_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    seven = (REASONING, "--model", "Qwen/Qwen2.5-7B-Instruct", "--gpus", "8")
    default, half, tiny = (
        planned(capsys, *seven, *share) for share in ((), ("engine.memory=0.5",), ("engine.memory=0.01",))
    )
    # 0.3 of 80 GB less 1.1 times the weights, over 57,344 bytes for each of 5,120 tokens
    assert default["episodes"] == int((24e9 - 1.1 * 2 * 7_615_616_512) // (57_344 * 5120)) == 24
    assert half["episodes"] > default["episodes"] and half["fits"]
    assert tiny["episodes"] == 0 and not tiny["fits"]
    assert [one for one in tiny["change"] if one.startswith("engine.memory=0.")]
    assert main(["plan", *seven, "engine.memory=3"]) == 2


def test_the_local_engine_uses_all_remaining_memory(capsys: pytest.CaptureFixture[str]) -> None:
    local = planned(capsys, REASONING, "--model", "Qwen/Qwen3-0.6B", "engine.type=local")
    vllm = planned(capsys, REASONING, "--model", "Qwen/Qwen3-0.6B")
    assert local["engine_memory_share"] is None and vllm["engine_memory_share"] == 0.3
    assert local["episodes"] > vllm["episodes"] > 0


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), LoraSettings().target_modules, ("all-linear",)])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapter_parameters_equal_those_of_the_policy(
    family: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    config = AutoConfig.for_model(family, **SMALL)
    config.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config)
    choose_trained(model, lora=LoraSettings(rank=3, target_modules=targets), trained_layers=None)
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    plan = Training(max_tokens=64, lora_rank=3, lora_targets=targets)
    assert plan.trained_parameters(find_shape(str(tmp_path))) == trained


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_trained_layers_equal_those_of_the_policy(family: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(family, **SMALL)
    config.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config)
    choose_trained(model, lora=None, trained_layers=2)
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    shape = find_shape(str(tmp_path))
    assert Training(max_tokens=64, trained_layers=2).trained_parameters(shape) == trained
    with pytest.raises(ConfigError, match="has 4 layers"):
        Training(max_tokens=64, trained_layers=5).trained_parameters(shape)


def test_adapters_of_an_unknown_matrix_are_refused() -> None:
    shape = find_shape_of("Qwen/Qwen3-8B")
    with pytest.raises(ConfigError, match="c_attn"):
        Training(max_tokens=64, lora_rank=8, lora_targets=("c_attn",)).trained_parameters(shape)


def test_a_frozen_model_has_neither_masters_nor_moments() -> None:
    """1.7B with adapters of rank 16: 3.44 GB of weights, about 0.3 GB of states."""
    shape = find_shape_of("Qwen/Qwen3-1.7B")
    adapters = Training(max_tokens=5120, lora_rank=16, lora_targets=LoraSettings().target_modules)
    rank = rank_bytes(shape, adapters)
    assert rank["frozen weights"] == 2 * shape.num_parameters
    states = sum(rank[name] for name in ("masters", "moments", "gradients", "working copy"))
    assert states == 18 * adapters.trained_parameters(shape) < 0.4e9
    whole = rank_bytes(shape, Training(max_tokens=5120))
    assert whole["frozen weights"] == 0 and whole["activations kept"] > rank["activations kept"]
    assert sum(whole.values()) - sum(rank.values()) > 14 * shape.num_parameters


def test_optimizer_states_in_8_bit_or_in_host_memory_are_counted() -> None:
    """Bytes on the GPU per trained parameter, and in host memory."""
    shape = find_shape_of("Qwen/Qwen3-1.7B")

    def per_parameter(states: str, **settings: Any) -> float:
        training = Training(max_tokens=64, optimizer_states=states, **settings)
        rank = rank_bytes(shape, training)
        names = ("masters", "moments", "gradients", "working copy")
        return sum(rank[name] for name in names) / training.trained_parameters(shape)

    measured = {states: per_parameter(states) for states in ("float32", "8bit", "cpu")}
    assert measured == {"float32": 18, "8bit": 12.03125, "cpu": 2}
    assert per_parameter("cpu", precision="float32") == 4
    adapters = {"lora_rank": 16, "lora_targets": LoraSettings().target_modules}
    assert per_parameter("8bit", **adapters) == 12.03125
    on_host = Training(max_tokens=64, optimizer_states="cpu")
    assert host_bytes(shape, on_host) == 16 * shape.num_parameters
    assert host_bytes(shape, replace(on_host, is_averaged=True)) == 20 * shape.num_parameters
    assert host_bytes(shape, replace(on_host, optimizer_states="8bit")) == 0


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3_text"])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("on_cpu", [False, True])
def test_stored_activations_equal_what_autograd_holds(
    family: str, lora: bool, on_cpu: bool, tmp_path: Path
) -> None:
    """Without the fused modules of a CPU as on a GPU, but with the CPU's attention. The norm after the last
    layer, which the plan leaves out, is one of several norms here.
    """
    config = AutoConfig.for_model(family, **{**SMALL, "hidden_size": 128, "num_hidden_layers": 6})
    config.save_pretrained(tmp_path)
    register()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=IMPLEMENTATION)
    adapters = LoraSettings(rank=2)
    if lora:
        choose_trained(model, lora=adapters, trained_layers=None)
    if on_cpu:
        fuse(model)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    held: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in own:
            held[place] = tensor
        return tensor

    num, plan = 48, TreePlan(segments=(Segment(length=48),))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ids = torch.arange(num)[None]
        output = model.base_model(input_ids=ids, position_ids=ids, use_cache=False, plan=plan)
    assert output.last_hidden_state.requires_grad
    training = Training(
        on_cpu=on_cpu, max_tokens=num, lora_rank=2 if lora else None, lora_targets=adapters.target_modules
    )
    planned = activation_bytes(find_shape(str(tmp_path)), training)
    assert sum(one.untyped_storage().nbytes() for one in held.values()) == pytest.approx(planned, rel=0.1)


def test_the_reference_of_a_4_bit_base_has_4_bits_and_an_averaged_teacher_float32_averages() -> None:
    shape = find_shape_of("Qwen/Qwen3-4B")
    adapters = {"lora_rank": 16, "lora_targets": LoraSettings().target_modules}
    packed = Training(max_tokens=64, is_4bit=True, has_reference=True, **adapters)  # type: ignore[arg-type]
    rank = rank_bytes(shape, packed)
    own_copy = 2 * packed.trained_parameters(shape)
    assert rank["reference"] == rank["frozen weights"] + own_copy < shape.num_parameters
    whole = Training(max_tokens=64, has_reference=True)
    averaged = rank_bytes(shape, replace(whole, is_averaged=True))
    assert averaged["reference"] - rank_bytes(shape, whole)["reference"] == 4 * shape.num_parameters


def test_the_slots_of_the_local_engine_are_those_of_its_decoding_graphs() -> None:
    assert [reserved_slots(num) for num in range(1, 200)] == [
        DecodeGraphs.num_slots(n) for n in range(1, 200)
    ]
    work = replace(WORK, shares_weights=True, training=Training(max_tokens=64, checkpointed=True))
    for memory in range(10, 60, 3):
        found = fit(find_shape_of("Qwen/Qwen3-0.6B"), work, Layout(), gpu_memory=memory * 1e9)
        room = (memory * 1e9 - found.engine_gpu) / 1.1 / (found.token * work.context)
        if found.episodes:
            assert reserved_slots(found.episodes) <= room < reserved_slots(found.episodes + 1)


def test_settings_that_save_memory_are_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    """Also, layouts of several processes, which have no such settings, are planned without them."""
    recipe = str(RECIPES / "one-card" / "countdown-qwen3-1.7b.toml")
    plan = planned(capsys, recipe, "--gpu-memory", "24")
    assert plan["fits"] and plan["host_bytes"] == 16 * plan["trained_parameters"]
    usual = planned(capsys, recipe, "--gpu-memory", "24", "optimizer.states=float32")
    assert not usual["fits"] and "optimizer.states=cpu" in usual["change"]
    for one, other in zip(plan["fewest"][1:], usual["fewest"], strict=True):
        assert one["layout"] == other["layout"]
    main(["plan", recipe, "--gpu-memory", "24"])
    assert re.search("^host memory +27.53 GB", capsys.readouterr().out, re.MULTILINE)
    recipe = str(RECIPES / "one-card" / "functions-qwen3-1.7b-lora.toml")
    assert planned(capsys, recipe, "--gpu-memory", "10")["change"] == ["model.lora.base=4bit"]


@pytest.mark.parametrize(
    ("family", "targets"), [("qwen3", LoraSettings().target_modules), ("qwen3_5_text", ("all-linear",))]
)
def test_frozen_weights_in_4_bit_are_counted(family: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    """Equal to what the layers of a quantized model hold; the embedding is not quantized."""
    pytest.importorskip("bitsandbytes")
    config = AutoConfig.for_model(family, **SMALL)
    config.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    lora = LoraSettings(rank=2, target_modules=targets, base="4bit")
    choose_trained(model, lora=lora, trained_layers=None)
    held = 0
    for parameter in (one for one in model.parameters() if not one.requires_grad):
        held += parameter.nbytes
        if (state := getattr(parameter, "quant_state", None)) is not None:
            held += state.absmax.nbytes + state.state2.absmax.nbytes
    shape = find_shape(str(tmp_path))
    training = Training(max_tokens=64, precision="float32", lora_rank=2, lora_targets=targets, is_4bit=True)
    counted = rank_bytes(shape, training)["frozen weights"]
    assert counted == pytest.approx(held, rel=2e-3)
    assert counted < 0.5 * rank_bytes(shape, replace(training, is_4bit=False))["frozen weights"]


def test_a_4_bit_base_is_loaded_as_a_whole_before_it_is_packed() -> None:
    shape = find_shape("Qwen/Qwen3-4B")
    few = Training(max_tokens=16, lora_rank=16, lora_targets=LoraSettings().target_modules, is_4bit=True)
    assert sum(rank_bytes(shape, few).values()) == pytest.approx(2 * shape.num_parameters)
    many = replace(few, max_tokens=65_536)
    assert rank_bytes(shape, many)["weights before 4 bit"] == 0


@given(st.sampled_from(sorted(known_models())), st.integers(1, 8), st.booleans())
def test_fewer_trained_layers_never_need_more_memory(name: str, ranks: int, checkpointed: bool) -> None:
    shape = find_shape_of(name)
    sums = [
        sum(
            rank_bytes(
                shape,
                Training(max_tokens=2048, ranks=ranks, checkpointed=checkpointed, trained_layers=layers),
            ).values()
        )
        for layers in (1, shape.num_layers // 2, shape.num_layers)
    ]
    whole = rank_bytes(shape, Training(max_tokens=2048, ranks=ranks, checkpointed=checkpointed))
    assert sums == sorted(sums) and sums[-1] <= sum(whole.values())


@pytest.mark.parametrize(
    ("size", "memory", "fits"),
    [("0.6B", 24, True), ("1.7B", 24, False), ("1.7B", 80, True), ("4B", 80, False), ("32B", 80, False)],
)
@pytest.mark.parametrize("lora", [False, True])
def test_adapters_fit_cards_that_full_fine_tuning_does_not(
    size: str, memory: int, fits: bool, lora: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", f"Qwen/Qwen3-{size}", "--gpu-memory", str(memory), *["model.lora={}"] * lora]
    plan = planned(capsys, str(RECIPES / "one-gpu.toml"), *options)
    assert plan["fits"] is (fits or (lora and size != "32B"))


def test_layouts_that_no_recipe_can_use_are_not_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    def fewest(*options: str) -> dict[str, int]:
        plan = planned(capsys, REASONING, *options)
        return {one["layout"]["placement"]: one["layout"]["num_gpus"] for one in plan["fewest"]}

    # colocated engines of 2 GPUs would fit, but a colocated engine has one GPU
    assert fewest("--model", "Qwen/Qwen3-14B") == {"disaggregate": 9}
    assert main(["plan", REASONING, "--model", "Qwen/Qwen3-14B"]) == 1
    assert "(disaggregate)\n" in capsys.readouterr().out  # no other setting is needed
    colocated = ["--model", "Qwen/Qwen3-0.6B", "--gpus", "8", "--tensor-parallel", "2"]
    plan = planned(capsys, REASONING, *colocated)
    assert not plan["fits"] and "tensor_parallel = 1" in plan["refused"]
    settings = run_settings(REASONING, overrides=["model.name=openai/gpt-oss-20b", "update.attention=flex"])
    assert unpacked_refusal(settings).startswith("update.attention = flex needs a model that runs packed")
    demo = str(RECIPES / "demo.toml")
    large = ["--model", "Qwen/Qwen3.5-4B", "--device", "cpu", "--gpu-memory", "400"]
    assert main(["plan", demo, *large, "cluster.num_trainers=2"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "cluster.num_trainers = 2 needs a model that runs packed" in out
    # the ranks of a model that is computed unpacked
    for unpacked in (
        ["--model", "openai/gpt-oss-20b"],
        ["--model", "Qwen/Qwen3-8B", "model.forward=unpacked"],
    ):
        assert fewest(*unpacked) == {}
        assert "runs packed" in planned(capsys, REASONING, *unpacked, "--gpus", "8")["refused"]


def test_linear_attention_has_a_state_per_episode_and_no_keys(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, REASONING, "--model", "Qwen/Qwen3.5-4B", "model.lora={}")
    assert plan["token_bytes"] == 2 * 2 * 8 * 4 * 256  # 8 of 32 layers have keys and values
    states = 24 * 4 * (32 * 128 * 128 + 3 * (2 * 16 + 32) * 128)
    room = 0.3 * 80e9 - 1.1 * plan["engine_weight_bytes"]
    assert plan["episodes"] == int(room // (5120 * plan["token_bytes"] + states))


@pytest.mark.parametrize(("recipe", "size"), [("demo", 0), ("demo-cluster", 4 * 134_515_008)])
def test_bytes_of_a_sync(recipe: str, size: int, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, str(RECIPES / f"{recipe}.toml"), "--device", "cpu", "--gpu-memory", "24")
    assert plan["sync_bytes"] == size


@pytest.mark.parametrize("name", ["demo", "demo-cluster"])
def test_plan_of_a_cpu_recipe(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(RECIPES / f"{name}.toml")
    plan = planned(capsys, recipe, "--device", "cpu", "--gpu-memory", "24")
    assert plan["fits"] and plan["device"]["is_cpu"] and plan["update_seconds"] is None
    assert not planned(capsys, recipe, "--device", "cpu", "--gpu-memory", "1")["fits"]
    assert not planned(capsys, recipe, "--device", "A100")["device"]["is_cpu"]
    main(["plan", recipe])
    out = capsys.readouterr().out
    assert "GPU" not in out and "on the CPU" in out
    assert main(["plan", recipe, "--device", "cpu", "--gpus", "2"]) == 2


@pytest.mark.parametrize("options", [[], ["--device", "H100", "--gpus", "8"]])
def test_the_lines_of_a_plan_fit_80_columns(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "recipes/demo.toml", *options])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 10 and max(map(len, lines)) <= 80


def test_gpu_memory_alone_plans_a_gpu_of_unknown_speed(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, str(RECIPES / "demo.toml"), "--gpu-memory", "24")
    assert not plan["device"]["is_cpu"] and plan["device"]["memory"] == 24e9
    assert plan["update_seconds"] is None and plan["refused"] is None


def test_the_layout_of_one_process_counts_and_a_refused_layout_does_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = [str(RECIPES / "demo.toml"), "model.name=Qwen/Qwen2.5-1.5B-Instruct", "--device", "H100"]
    options += ["--gpu-memory", "24"]

    def rows() -> tuple[str, list[str]]:
        text = re.sub("\n +", " ", capsys.readouterr().out)
        return text, [line for line in text.splitlines() if line.startswith(("fits", "fewest GPUs"))]

    assert main(["plan", *options]) == 0
    _, [fits, process, colocate, disaggregate] = rows()
    assert fits.split() == ["fits", "yes"]
    assert process.split()[2] == "1" and process.endswith("one process on one GPU")
    assert colocate.split()[2] == "2" and "(colocate); the recipe needs other settings" in colocate
    assert "engine.type = vllm" in colocate and disaggregate.endswith("(disaggregate)")
    assert main(["plan", *options, "--gpus", "8"]) == 1
    text, [fits, *_] = rows()
    assert fits.split()[1] == "no" and "cannot use this layout: cluster.placement = colocate needs" in fits
    assert not re.search("pass in work|more than there is|not yet", text)
    assert main(["plan", *options[:-1], "9"]) == 1
    assert "needs more memory than a GPU has" in rows()[0]
