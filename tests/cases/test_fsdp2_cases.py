"""Faults that were reported elsewhere: right here, on two real ranks."""

from __future__ import annotations

from bigmodel.running.rendezvous import group_backend
from tests.fsdp2.launch import check


def test_ac_01_weights_are_gathered_twice_a_block():
    check("check_gathers_are_counted")


def test_ac_08_two_forwards_before_one_backward():
    check("check_two_forwards_before_one_backward")


def test_unu_08_tied_weights_are_one_group():
    check("check_tied_weights")


def test_unu_13_norm_over_trained_parameters():
    check("check_norm_with_frozen_parameters")


def test_unu_15_unused_whole_parameter_stays():
    check("check_unused_whole_parameter_is_left_alone")


def test_zero_06_block_with_two_outputs_reduces_once():
    check("check_block_with_two_outputs")


def test_zero_10_methods_other_than_forward():
    check("check_methods_other_than_forward")


def test_zero_11_buffers_are_equal_on_all_ranks():
    check("check_buffers")


def test_zero_13_other_seeds_end_with_the_first_ranks_weights():
    check("check_ranks_with_other_seeds")


def test_mp_06_small_updates_add_up():
    check("check_small_updates_add_up")


def test_mp_10_whole_gradients_count_once():
    check("check_norm_of_shards_and_whole_parameters")


def test_mp_11_offloaded_gradients_have_a_backend():
    assert "cpu:gloo" in group_backend("cuda").split(",")
    check("check_offloading_changes_no_number")


def test_ga_08_postponed_reduction_keeps_whole_gradients():
    check("check_postponed_gradients")


def test_cfg_08_other_ranks_really_hold_no_weights():
    check("check_only_the_first_rank_makes_weights")
    check("check_memory_of_prepare")
