"""What XLA makes of our programs on an H200, read from what is compiled for one without having one."""

import gpu_compiler
import pytest

LARGE = [4096, 12288]
PUBLISHED = {"scales": "float16", "codes": "published", "dither": False}
QUESTIONS = {
    "adamw": ["step", "flash_adamw", LARGE, "bfloat16", "float32", {}],
    "adamw, bfloat16 gradients": ["step", "flash_adamw", LARGE, "bfloat16", "bfloat16", {}],
    "adamw, smaller": ["step", "flash_adamw", [4096, 4096], "bfloat16", "bfloat16", {}],
    "adamw, loss scaling": ["step", "flash_adamw", LARGE, "bfloat16", "bfloat16", {"scaled": True}],
    "adamw, float16": ["step", "flash_adamw", LARGE, "float16", "float32", {}],
    "adamw, float32": ["step", "flash_adamw", LARGE, "float32", "float32", {}],
    "adamw, 32 bits": ["step", "flash_adamw", LARGE, "bfloat16", "float32", {"storage": {"master_weight_bits": 32}}],
    "adamw, rows": ["step", "flash_adamw", LARGE, "bfloat16", "float32", {"storage": {"layout": "rows"}}],
    "adamw, float16 scales": ["step", "flash_adamw", LARGE, "bfloat16", "float32", {"storage": {"scales": "float16"}}],
    "adamw, published": ["step", "flash_adamw", LARGE, "bfloat16", "float32", {"storage": PUBLISHED}],
    "adamw, small": ["step", "flash_adamw", [256, 1024], "bfloat16", "float32", {}],
    "adamw, odd": ["step", "flash_adamw", [768, 50257], "bfloat16", "float32", {}],
    "lion": ["step", "flash_lion", LARGE, "bfloat16", "float32", {}],
    "two steps": ["two steps"],
    "law": ["law"],
    "release": ["release"],
    "kept": ["kept"],
    "laplacian": ["laplacian"],
    "residual": ["residual"],
    "head": ["head"],
    "filters": ["filters"],
    "causal": ["causal"],
    "spectral": ["spectral"],
    "mixed": ["mixed"],
    "decays": ["decays"],
    "handed on": ["handed on"],
    "experts": ["experts"],
    "recurrent": ["recurrent"],
    "parallel": ["parallel"],
    "sharded": ["sharded"],
    "looked up": ["looked up"],
    "group norm": ["group norm"],
    "activations": ["activations"],
    "moved": ["moved"],
    "selective": ["selective"],
    "layers": ["layers", []],
    "layers, with repeats": ["layers", ["merge_repeats"]],
    "layers, rounded twice": ["layers", ["round_once"]],
    "negated": ["negated"],
    "chunks": ["chunks", []],
    "chunks, as matmuls": ["chunks", ["multiply_outer_products"]],
    "u-net": ["u-net", []],
    "u-net, rounded late": ["u-net", ["round_early"]],
    "forgetting": ["forgetting"],
    "states": ["states"],
    "batch norm": ["batch norm"],
    "solve": ["solve"],
    "softmax": ["softmax", False],
    "softmax in a scan": ["softmax", True],
    "masked": ["masked"],
    "fp8": ["fp8", 1],
    "fp8 on 8": ["fp8", 8],
    "turned": ["turned"],
    "quantized in loops": ["quantized in loops"],
}
STEPS = [name for name, question in QUESTIONS.items() if question[0] == "step"]


@pytest.fixture(scope="module")
def answers():
    why = gpu_compiler.why_not()
    if why:
        pytest.skip(why)
    return dict(zip(QUESTIONS, gpu_compiler.ask(list(QUESTIONS.values())), strict=True))


@pytest.mark.parametrize("name", STEPS)
def test_no_moment_reaches_memory(answers, name):
    """The largest of each group do, in float32: 4 bytes of 32 parameters for each moment."""
    assert answers[name]["temporary"] <= 0.3


@pytest.mark.parametrize("name", [name for name in STEPS if name != "adamw, float16"])
def test_corrections_are_not_dropped(answers, name):
    """XLA makes `x - x` of a rounding error that goes by way of a cast."""
    assert not answers[name]["subtracts_itself"]
    assert answers[name]["reads_bits"] == (name != "adamw, float32")


def test_no_byte_is_stored_from_a_float(answers):
    """ptxas may take the last byte of a float32's bits for the number converted to an integer."""
    assert answers["adamw, small"]["bytes_from"]
    assert "f32" not in answers["adamw, small"]["bytes_from"]


def test_a_step_is_three_kernels(answers):
    """Maxima, the step, the scales; and three for the scalars of the step and the 32 numbers of the dither."""
    assert answers["adamw"]["kernels"] <= 6
    assert answers["lion"]["kernels"] <= 6


@pytest.mark.parametrize("name", STEPS)
def test_one_kernel_reads_gradients_before_they_are_used(answers, name):
    """Pass 1. Whether they are finite, which loss scaling asks, takes no other; pass 2 is behind a barrier."""
    assert answers[name]["reads"] == 1


def test_steps_are_not_made_one(answers):
    """XLA would drop the cast to bfloat16 between them, and the second would add the correction to the exact weight."""
    assert answers["two steps"]["kernels"] == 2


def test_weights_are_not_read_before_they_are_rounded(answers):
    """In one kernel, XLA would drop the cast to bfloat16 and add the correction to the exact weight."""
    assert min(answers["law"]["kernels"]) == 2


def test_gradients_are_freed_as_they_are_used(answers):
    """One program of backward pass and step holds a few gradients at a time, not all of them.

    If steps shared the array of the dither, XLA would make one kernel of several steps.
    """
    assert answers["release"]["temporary"] < 0.1


def test_the_cotangent_of_a_solve_is_not_rounded_and_the_operand_is(answers):
    """By default, XLA would multiply in TF32, and take the operand as it was before the forward pass rounded it."""
    assert answers["solve"]["rounded"]
    assert answers["solve"]["matmuls"] == [["f32", "highest", "highest"]] * 2


@pytest.mark.parametrize("name", ["softmax", "softmax in a scan"])
def test_a_softmax_and_its_gradient_are_a_kernel_each(answers, name):
    """Besides matmuls, nothing else writes scores or sums of their rows."""
    kernels = [kernel for kernel in answers[name]["kernels"] if not kernel.startswith("gemm")]
    assert kernels == ["fusion", "fusion"]


def test_a_masked_softmax_takes_neighbouring_rows(answers):
    """For a mask that is repeated over heads and examples, XLA would take one row of 16 of these."""
    rows = answers["masked"]["rows"]
    assert [sizes[:2] for sizes in rows] == [[1, 1], [1, 1]]  # forward and backward
    assert min(sizes[2] for sizes in rows) > 1


def test_what_a_scan_keeps_is_not_turned(answers):
    """XLA would turn queries, keys and values of all layers for a single reader of the values."""
    assert answers["kept"]["kernels"] == ["loop_broadcast_fusion"]


def test_second_derivatives_need_about_what_a_plain_cast_needs(answers):
    """Kernels, and temporary bytes. With checkpoints inside of them, it would be twice the kernels."""
    for ours, cast in zip(answers["laplacian"]["ours"], answers["laplacian"]["cast"], strict=True):
        assert ours <= 1.05 * cast


def test_a_residual_network_writes_no_masks_and_nothing_in_float32(answers):
    """XLA would write the mask of each relu, and what is after it in float32; and scatter the gradient of the pool."""
    assert answers["residual"] == {"dtypes": ["bf16", "s8"], "scatters": 0}


def test_the_head_of_an_odd_number_of_words(answers):
    """Its matmuls are padded; the scores and their gradient are written once each, and nothing is scattered."""
    assert answers["head"] == {"widths": [50264], "dtypes": ["bf16", "bf16"], "scatters": 0}


def test_dilated_and_transposed_convolutions_have_kernels_for_their_filters(answers):
    """XLA would take the cotangent for the filter of a convolution forward, of 132 x 132 entries."""
    kernels, largest = answers["filters"].values()
    assert kernels.count("convBackwardFilter") == 2
    assert largest == 4


def test_causal_convolutions_keep_their_holes_and_nothing_is_added_to_them(answers):
    """XLA would make filters of 17 entries, and let cuDNN add the skip connections, for which it is slow."""
    assert set(answers["causal"]["kernels"]) == {"convForward", "convBackwardFilter"}
    assert answers["causal"]["sizes"] == [3] * 6


def test_activations_between_transforms_are_low(answers):
    """Transforms read and write float32, but turned: the time is their last axis."""
    assert answers["spectral"]["with"] <= answers["spectral"]["without"] / 2


def test_norms_in_front_of_matmuls_of_tokens_are_not_written_in_float32(answers):
    """Their cotangents come turned, for the scale, the mean and the variance: XLA would write one for each."""
    assert answers["mixed"]["with"] == 0 < answers["mixed"]["without"]


def test_the_decays_of_linear_attention_have_no_cotangents_in_float32(answers):
    """Sums of rows and of columns read them: XLA would write one for all."""
    assert answers["decays"]["with"] == 0 < answers["decays"]["without"]


def test_scores_with_decays_have_no_cotangents_in_float32(answers):
    """Sums of rows and of columns read them, and two matmuls."""
    assert answers["forgetting"]["with"] == 0 < answers["forgetting"]["without"]


def test_states_of_a_loop_are_kept_once_and_rounded(answers):
    """What is kept is what the loop returns: XLA sees that."""
    assert answers["states"] == {"with": ["bf16"], "without": ["bf16", "f32"]}


def test_a_low_value_that_two_sections_widen_is_not_written_in_float32(answers):
    assert answers["handed on"] == 0


def test_experts_multiply_their_own_rows(answers):
    """XLA would multiply all rows by the matrices of all eight: forward, and for both gradients."""
    assert answers["experts"]["matmuls"] >= 4
    assert answers["experts"]["rows"] < 1.5


def test_a_weight_is_rounded_once_for_all_rounds_of_a_loop(answers):
    assert answers["recurrent"] == 1


def test_a_recurrence_in_parallel_writes_its_values_rounded(answers):
    """XLA drops a rounding that all readers undo: without barriers, kernels move 139 MiB in float32."""
    assert answers["parallel"]["f32"] < 100


def test_layouts_gather_nothing(answers):
    """The partitioner would gather what has a layout asked for; gradients are summed over devices, and that is all."""
    assert answers["sharded"]["collectives"] == ["all-reduce"]


def test_what_is_looked_up_on_other_devices_is_sent_low_and_its_gradient_summed_in_float32(answers):
    """4,096 rows of 256 numbers, and the gradient of the weight."""
    assert answers["looked up"] == [
        ["all-gather", "bfloat16", 2 * 2**20],
        ["all-reduce", "float32", 2**18],
        ["reduce-scatter", "float32", 4 * 2**20],
    ]


def test_a_group_norm_writes_nothing_in_float32(answers):
    """Of its backward pass, the sums for images and channels are all that is float32."""
    assert answers["group norm"]["with"] == 0
    assert answers["group norm"]["without"] > 0


def test_results_of_activations_are_written_once(answers):
    """One array less for each of four layers: the backward pass does not make them again."""
    for fun in ("relu", "tanh"):
        assert answers["activations"][f"{fun} with"] == answers["activations"][f"{fun} without"] - 4


def test_features_that_are_looked_up_are_not_written_in_float32(answers):
    """Of 16 MiB, for each of both ends in three layers."""
    assert answers["moved"]["with"] <= answers["moved"]["without"] - 3 * 2 * 16


def test_a_state_space_takes_no_more_than_a_cast(answers):
    found = answers["selective"]
    assert found["with"] <= found["cast"]
    assert found["with"] < 0.6 * found["without"]


def test_a_network_and_its_derivative_share_their_matmuls(answers):
    """Each of four layers would have a cotangent of its own for the energy, and another one for the forces."""
    assert answers["layers"]["matmuls"] <= answers["layers, with repeats"]["matmuls"] - 4


def test_weights_are_rounded_once(answers):
    assert answers["layers"]["casts"] == 4
    assert answers["layers, rounded twice"]["casts"] > 4


def test_what_is_added_in_memory_is_not_negated_on_the_way(answers):
    """XLA would compare and swap: of many who read one row, each would wait for all others."""
    assert answers["negated"] == {"with": False, "without": True}


def test_a_batch_norm_reads_its_image_for_four_sums(answers):
    """For the mean, for the variance, and in the backward pass once, with the cotangent, for both sums there."""
    assert answers["batch norm"]["with"] == 4
    assert answers["batch norm"]["without"] > 4


def test_matmuls_are_fp8_in_both_passes(answers):
    """Six forward, and two gradients of each but the first's by the batch."""
    forward, backward = ["f8e4m3fn", "f8e4m3fn"], ["f8e4m3fn", "f8e5m2"]
    assert answers["fp8"]["fp8"]["dots"] == [forward] * 6 + [backward] * 11


def test_bytes_alone_are_turned_for_fp8(answers):
    """XLA would turn the float32 weights and masks of them, to get bytes in the order that cuBLAS wants."""
    assert answers["turned"] == {"matmuls": 5, "dtypes": ["f8e4m3fn", "f8e5m2"]}


def test_weights_are_quantised_in_front_of_loops(answers):
    """XLA moves nothing out of the loop of a gradient accumulation by itself."""
    found = answers["quantized in loops"]
    assert (found["amp"], found["once"]) == (0, 0)
    assert found["around"] > 0


def test_fp8_needs_no_more_memory(answers):
    assert answers["fp8"]["fp8"]["temporary"] <= answers["fp8"]["bfloat16"]["temporary"]


def test_weights_are_gathered_in_fp8(answers):
    """Gradients are summed in float32; scales are scalars."""
    assert answers["fp8 on 8"]["bfloat16"]["sent"] == ["bfloat16", "float32"]
    assert answers["fp8 on 8"]["fp8"]["sent"] == ["float32", "float8_e4m3fn"]


def test_outer_products_are_not_written_in_float32(answers):
    """As matmuls, XLA would turn their results before it rounds them."""
    assert 1.5 * answers["chunks"] < answers["chunks, as matmuls"]


def test_a_u_net_writes_its_skip_connections_low(answers):
    """In float32 is what the last layer makes: only the loss reads it."""
    assert answers["u-net"] <= 16 < answers["u-net, rounded late"]
