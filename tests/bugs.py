"""Real faults of this field (facts/bugs.md of the project's notes, B2 to B167) and what holds each.

An id maps to the tests that try its case here, or to one sentence why the fault cannot be expressed
in this code. Run by pytest: an id of a written chapter without an entry fails, and so does a name
that is no test. `python tests/bugs.py` prints the counts.
"""

import re
from pathlib import Path

import pytest

IDS = {
    "01": "2 3 4 6 7 8 9 10",
    "02": "12 14 15 16 17 18 20 21 22 23 24 25 26 27 28 29",
    "03": "30 31 33 34 35 37 38 39 40 41 42 43 45 46 47 48 49 50 51 52 53 55",
    "04": "56 58 60 61 62 63 64 65 66 67 68 69 70 71 72",
    "05": "73 75 77 78 79 81 82 83 85 86 87 88 89 90 91 92 93 94",
    "06": "96 97 98 100 101 103 104 105 106 107 108 110 111 112 113",
    "07": "114 116 118 119 120 122 123 124 125 126 127 128 129 130",
    "08": "131 134 135 137 138 139 140 141 142 143",
    "09": "145 146 148 149 150 151 152 153",
    "X": "156 157 158 159 161 162 163 164 165 166 167",
}
# Chapters whose every id has to be mapped.
WRITTEN = ["01", "02", "03", "04", "05", "06", "07", "08", "09", "X"]

NINE, FP8, FAULTS = "test_09_all_axes::test_", "test_08_fp8::test_", "test_faults::test_"
FILES = (
    "01_memory", "02_dp", "03_zero", "03_checkpoint", "04_tp_sp", "09_tp", "05_pp", "06_ep",
    "07_cp_ring",
)  # fmt: skip
MEMORY, DP, ZERO, CKPT, TP, NINE_TP, PP, EP, CP = (f"test_{file}::test_" for file in FILES)

TESTS = {  # id: names of tests, "file::test"
    2: f"{MEMORY}stages_keep_their_own_bytes",
    3: f"{MEMORY}tying_changes_parameters_and_not_flops {MEMORY}parameter_count_is_exact",
    4: f"{MEMORY}parameter_count_is_exact",
    6: f"{MEMORY}no_copy_of_a_weight_is_kept",
    7: f"{MEMORY}attention_against_unfused_products {MEMORY}conventions"
       f" {MEMORY}mfu_is_none_without_a_peak_and_at_most_1",
    8: f"{MEMORY}lookup_costs_nothing_and_recomputation_is_not_useful",
    10: f"{MEMORY}mfu_is_none_without_a_peak_and_at_most_1",
    12: f"{DP}one_reduction_a_step_whatever_the_order_of_forwards_and_backwards"
        f" {DP}deferred_weight_gradients_start_the_reduction_when_they_are_finished",
    14: f"{DP}unused_on_some_ranks_is_summed_and_unused_on_all_stays_none",
    15: f"{DP}shared_weight_has_one_place_and_the_sum_of_its_uses",
    16: f"{DP}one_reduction_a_step_whatever_the_order_of_forwards_and_backwards"
        f" {DP}every_form_has_the_gradients_of_one_device",
    17: f"{DP}ranks_with_different_numbers_of_micro_batches_do_not_hang",
    18: f"{DP}every_rank_gets_as_many_samples_and_together_each_once",
    20: f"{DP}any_split_of_one_global_batch_is_the_same_training"
        " test_02_tools::test_uneven_valid_tokens_give_the_dense_gradient",
    21: f"{DP}any_split_of_one_global_batch_is_the_same_training",
    22: f"{DP}the_norm_of_a_summed_gradient_is_a_local_matter",
    23: f"{DP}gradients_below_fp32_are_summed_in_fp32",
    24: f"{DP}gradients_below_fp32_are_summed_in_fp32"
        f" {DP}bf16_on_the_wire_rounds_twice_and_adds_in_fp32",
    25: f"{DP}non_contiguous_parameters",
    27: f"{DP}infinity_on_one_rank_is_seen_by_all",
    28: f"{DP}every_form_has_the_gradients_of_one_device",
    29: f"{DP}any_split_of_one_global_batch_is_the_same_training",
    30: f"{ZERO}empty_shards_and_empty_parameters",
    31: f"{ZERO}one_rule_says_what_belongs_to_a_rank",
    33: f"{CKPT}there_and_back_through_other_layouts_is_bit_for_bit",
    34: f"{ZERO}the_padded_length_is_the_next_multiple",
    35: f"{ZERO}one_rule_says_what_belongs_to_a_rank",
    37: f"{ZERO}no_micro_batch_is_lost_or_counted_twice_also_when_deferred"
        f" {ZERO}every_collective_is_waited_for_exactly_once",
    38: f"{ZERO}gradients_may_arrive_in_any_order",
    39: f"{ZERO}the_size_of_a_unit_changes_nothing",
    41: f"{ZERO}a_unit_out_of_turn_is_refused",
    42: f"{ZERO}empty_shards_and_empty_parameters",
    43: f"{CKPT}there_and_back_through_other_layouts_is_bit_for_bit",
    45: f"{ZERO}frozen_weights_stay_as_they_are_and_nothing_is_kept_for_them",
    46: f"{CKPT}unfreezing_through_a_checkpoint {ZERO}what_cannot_be_right_is_refused_by_name",
    47: f"{ZERO}bf16_and_fp32_parameters_in_one_unit",
    48: f"{ZERO}every_element_counts_once_in_the_norm",
    49: f"{ZERO}every_element_counts_once_in_the_norm",
    50: f"{ZERO}every_stage_computes_what_one_process_computes",
    51: f"{CKPT}there_and_back_through_other_layouts_is_bit_for_bit",
    52: f"{CKPT}ranks_with_different_numbers_of_parameters",
    53: f"{ZERO}infinity_on_one_shard_skips_the_step_everywhere",
    55: f"{ZERO}recomputation_with_a_frozen_block_finds_its_parameters_and_gathers_no_more",
    56: f"{TP}a_row_parallel_bias_is_added_once",
    58: f"{TP}gradients_are_summed_over_the_ranks_that_hold_the_parameter"
        f" {TP}without_the_sum_the_loss_is_right_and_all_norm_gradients_are_wrong"
        f" {TP}ten_sgd_steps_leave_replicas_identical_bit_for_bit",
    60: f"{TP}parity_with_one_device {TP}degrees_that_do_not_fit_are_refused_with_the_nearest",
    62: f"{TP}vocab_parallel_loss {TP}parity_with_one_device",
    63: f"{TP}vocab_parallel_loss",
    64: f"{TP}the_hidden_gradient_of_the_loss_is_summed_once_in_any_pieces",
    65: f"{TP}the_hidden_gradient_of_the_loss_is_summed_once_in_any_pieces",
    66: f"{NINE_TP}the_norm_counts_each_element_once",
    67: f"{TP}layers_below_a_frozen_one_get_their_gradients"
        f" {TP}shards_are_gathered_once_for_all_users_in_any_order",
    68: f"{TP}names_identity_ties_and_values_survive_the_cut",
    70: f"{TP}names_identity_ties_and_values_survive_the_cut",
    71: f"{TP}each_operation_sends_forward_and_backward_what_it_says"
        f" {TP}async_pairs_equal_the_plain_pair",
    72: f"{TP}what_does_not_fit_fails_at_once_on_all_ranks"
        f" {NINE_TP}what_does_not_fit_is_refused_with_the_nearest_choice",
    73: f"{PP}parity"
        f" {PP}parity_of_every_number_of_micro_batches",
    75: f"{PP}check_refuses_unlowered_and_naive_1f1b"
        f" {PP}every_schedule_is_complete_ordered_and_without_deadlock",
    78: f"{PP}micro_batches_of_different_lengths_and_sizes",
    79: f"{PP}parity",
    81: f"{PP}the_split_of_a_batch_changes_no_gradient",
    82: f"{PP}micro_batches_of_different_lengths_and_sizes",
    83: f"{PP}norm_of_all_stages_when_one_is_frozen",
    85: f"{PP}stages_together_are_the_model"
        f" {PP}parity",
    86: f"{PP}interleaved_refuses_and_names_the_nearest",
    87: f"{PP}an_output_is_let_go_when_it_has_been_sent"
        f" {PP}a_slow_rank_changes_nothing",
    88: f"{PP}an_output_is_let_go_when_it_has_been_sent"
        f" {PP}a_slow_rank_changes_nothing",
    89: f"{PP}frozen_stages",
    90: f"{PP}tied_head_under_zero"
        f" {PP}tied_head",
    91: f"{PP}tied_head"
        f" {PP}every_schedule_under_zero",
    92: f"{PP}a_w_runs_the_jobs_of_its_micro_batch_and_a_weight_used_twice_counts_twice",
    93: f"{PP}in_flight_and_bubble_are_the_formulas",
    94: f"{PP}a_slow_rank_changes_nothing"
        f" {PP}two_ranks_interleaved_where_next_and_previous_are_one",
    96: f"{EP}experts_without_tokens_under_buckets"
        f" {EP}one_token_or_none"
        f" {EP}one_kernel_equals_the_loop",
    97: f"{EP}one_token_or_none"
        f" {EP}uneven_ranks_and_micro_batches",
    98: f"{EP}every_layout_computes_what_one_device_does",
    103: f"{EP}bias_is_saved_with_the_model_in_fp32",
    104: f"{EP}bias_and_logged_numbers_do_not_depend_on_layout_or_recomputation",
    105: f"{EP}equal_scores_go_to_the_lowest_numbers",
    106: f"{EP}the_choice_is_made_in_fp32",
    107: f"{EP}order_of_softmax_and_choice",
    108: f"{EP}auxiliary_gradients_do_not_depend_on_the_split",
    110: f"{EP}auxiliary_gradients_do_not_depend_on_the_split",
    111: f"{EP}value_of_a_perfect_balance",
    112: f"{EP}padding_takes_no_place",
    113: f"{EP}one_kernel_equals_the_loop",
    114: f"{CP}merge_of_very_different_scores {CP}scores_hundreds_apart",
    116: f"{CP}merge_of_rows_that_see_nothing {CP}fused_kernels_are_the_formulas",
    118: f"{CP}model_gradient_by_gradient",
    119: f"{CP}zigzag_of_two_ranks {CP}model_gradient_by_gradient",
    120: f"{CP}counts_losses_and_norms_do_not_depend_on_the_layout {CP}09_with_cp_is_one_device",
    122: f"{CP}a_length_that_does_not_divide_padded_by_hand",
    123: f"{CP}lengths_that_do_not_divide_are_refused {CP}rules_of_09_on_cp",
    124: f"{CP}attention_of_every_kind {CP}model_gradient_by_gradient",
    125: f"{CP}09_notices_an_axis_that_is_not_active {CP}recomputation",
    126: f"{CP}counts_losses_and_norms_do_not_depend_on_the_layout",
    127: f"{CP}attention_of_every_kind",
    128: f"{CP}the_group_is_an_argument",
    129: f"{CP}attention_of_every_kind {CP}ulysses_refuses_heads_that_do_not_divide",
    157: f"{ZERO}the_gather_takes_a_wire_format",
    161: f"{CKPT}the_main_job_resumes_in_another_layout"
         " test_02_tools::test_an_epoch_is_every_window_once_and_the_next_one_another_order",
    162: f"{CKPT}the_same_layout_goes_on_bit_for_bit",
    165: f"{CKPT}a_damaged_checkpoint_is_passed_over_and_said_so"
         f" {CKPT}a_rank_killed_while_saving_leaves_the_last_good_one"
         f" {CKPT}a_full_disk_fails_on_all_ranks_alike_and_training_goes_on",
    167: f"{CKPT}the_same_layout_goes_on_bit_for_bit {CKPT}bf16_goes_on_bit_for_bit"
         f" {CKPT}training_goes_on_in_another_layout",
    100: "test_06_ep::test_one_norm_for_experts_and_all_else",
    101: "test_06_ep::test_a_stage_without_experts_clips_and_ends_its_step_with_the_others",
    158: f"{FAULTS}a_rank_that_hangs_is_named_with_the_collective"
         f" {FAULTS}rank_0_hangs_before_the_ranks_have_met"
         " test_09_combined::test_the_others_wait_for_the_reference_however_long_it_takes",
    159: f"{FAULTS}torchrun_brings_the_job_back_by_itself",
    163: f"{FAULTS}no_rank_is_left_without_a_part",
    131: f"{FP8}zeros_subnormals_and_values_that_are_not_finite"
         f" {FP8}one_huge_outlier_spoils_its_block_only",
    134: f"{FP8}pipelines_do_not_hang_and_compute_the_same",
    135: f"{FP8}history_rolls_with_use_and_a_spike_leaves_after_its_length"
         f" {FP8}evaluation_and_infinities_leave_no_trace",
    137: f"{FP8}sizes_that_no_block_divides_are_padded_exactly"
         f" {FP8}torch_s_own_fp8_product_is_the_emulation",
    138: f"{FP8}a_cut_model_is_the_model_of_one_device",
    139: f"{FP8}errors_on_outliers_and_the_format_of_gradients",
    140: f"{FP8}a_resumed_run_goes_on_with_its_scales"
         f" {FP8}without_its_history_a_resumed_run_is_another"
         f" {NINE}an_fp8_run_goes_on_in_another_layout",
    141: f"{FP8}seven_linears_of_each_block_and_nothing_else {FP8}an_unknown_name_is_an_error"
         f" {FP8}kept_out_by_name_also_on_a_stage_that_lacks_it",
    142: f"{FP8}finite_is_what_each_format_says"
         f" {FP8}overflow_saturates_and_what_is_not_finite_is_seen",
    143: f"{FP8}no_product_accumulates_fast",
    145: f"{NINE}layouts_compute_what_one_device_does",
    146: f"{NINE}layouts_compute_what_one_device_does",
    148: f"{NINE}layouts_compute_what_one_device_does"
         f" {NINE_TP}layouts_compute_what_one_device_does",
    149: f"{NINE}every_replica_computes_the_same_next_logits",
    150: f"{NINE}expert_groups_for_every_order_of_the_axes"
         " test_09_combined::test_mesh_of_any_order",
    151: f"{NINE}layouts_compute_what_one_device_does {ZERO}gradients_may_arrive_in_any_order",
    152: f"{NINE}the_check_sees {NINE}layouts_compute_what_one_device_does",
    153: f"{NINE}who_reads_which_samples",
    130: f"{CP}work_is_equal_with_zigzag_and_2n_minus_1_to_1_without"
         f" {CP}each_visible_pair_is_computed_once",
}  # fmt: skip

NOT_EXPRESSIBLE = {  # id: why this code cannot have the fault
    9: "One head_dim serves q, k and v, so a model with two head sizes cannot be built.",
    77: "No shapes are exchanged: each rank knows its micro-batches' shapes from the data's, and"
        " all transfers of a pipeline go through one group by global ranks.",
    61: "No tensor beside q, k and v follows the heads: they are cut by one table and counted by"
        " -1, and nothing is sliced again in attention.",
    69: "There is no dropout anywhere in this repository, so no mask has a seed to get wrong.",
    40: "Gradients are copied into the flat buffer on the stream that autograd made current; 03"
        " makes no side streams.",
    156: "No average exists in this code: every reduction is a SUM, or a MAX of flags.",
    164: "There is no dropout anywhere in this repository.",
    166: "There is no validation loop, and the number of steps is an argument on all ranks.",
    26: "Buckets makes no stream of its own: the copy into a bucket and the start of its sum run in"
        " the hook, on the stream that autograd made current (reasoned, not run on a GPU).",
}  # fmt: skip


def ids(chapter):
    return [int(i) for i in IDS[chapter].split()]


def unmapped():
    return [i for c in WRITTEN for i in ids(c) if i not in TESTS and i not in NOT_EXPRESSIBLE]


def test_every_fault_of_a_written_chapter_is_mapped():
    assert unmapped() == []
    assert not TESTS.keys() & NOT_EXPRESSIBLE.keys()
    assert all(len(why) > 20 for why in NOT_EXPRESSIBLE.values())


@pytest.mark.parametrize("bug", TESTS)
def test_the_tests_named_exist(bug):
    for name in TESTS[bug].split():
        file, test = name.split("::")
        text = (Path(__file__).parent / f"{file}.py").read_text()
        assert re.search(rf"^def {test}\(", text, re.M), name


def test_the_list_of_ids_is_complete():
    """Held against the notes, where they lie beside the repository."""
    notes = Path(__file__).resolve().parents[2] / "shared" / "facts" / "bugs.md"
    if notes.exists():
        listed = [int(i) for i in re.findall(r"^\| B(\d+) ", notes.read_text(), re.M)]
        assert sorted(listed) == sorted(i for c in IDS for i in ids(c))


def counts():
    for chapter in IDS:
        tested = sum(i in TESTS for i in ids(chapter))
        reasoned = sum(i in NOT_EXPRESSIBLE for i in ids(chapter))
        yield (
            f"{chapter:>3}: {len(ids(chapter)):3} faults, {tested:3} tested,"
            f" {reasoned:3} cannot occur"
        )


def test_counts(capsys):
    with capsys.disabled():
        print("\n" + "\n".join(counts()))


if __name__ == "__main__":
    print("\n".join(counts()))
