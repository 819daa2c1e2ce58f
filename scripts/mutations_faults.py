"""Faults that the tests must notice, for ``mutations.py``: each a replacement of text that occurs once, and who must
see it.

A fault is deliberate damage of a kind that would go unnoticed in a run: a wait, a fence, a reduction or a part of a key
left out. Where a test or check beside it stays green, it tests too little.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """A replacement in one file, and who must see it."""

    name: str
    file: str
    """Below the root of the checkout."""
    old: str
    """Must occur exactly once."""
    new: str
    tests: tuple[str, ...] = ()
    """Tests that need no GPU, as pytest names them; parameters may be left out. Each must fail."""
    checks: tuple[str, ...] = ()
    """Checks of tests/gpu/checks.py; each must fail on two GPUs."""


FP8 = "tests/distributed/test_fp8_ops.py"
PROGRAM = "tests/unit/comm/test_host_schedule.py"
REPLAYS = "tests/unit/ops/test_recordings.py"
P2P = "tests/unit/comm/test_p2p_schedule.py"
RECORD = "tests/distributed/test_record.py::test_a_figure_is_what_the_ranks_have_seen"
PLANS = "tests/unit/ops/test_fused_plans.py"
OPS, KERNELS = "megatron_flux/ops", "megatron_flux/kernels"
LATE = "tests/distributed/test_late_ranks.py"
TRIAL, BOXES = "tests/distributed/test_trial.py", "tests/distributed/test_agreement.py"
TE_FP8, TE_LAYERS_FP8 = "megatron_flux/patch/te_fp8", "tests/distributed/test_te_fp8.py"
LINKS = ("tests/distributed/test_preflight.py::test_the_link_of_the_slowest_rank_is_measured",)
_PREFLIGHT = "megatron_flux/slurm/preflight/ranks.py"
PLAIN_FENCES = "tests/unit/kernels/test_compiled.py::test_plain_kernels_have_their_fences"
TWIN, FENCES = (
    "tests/distributed/test_fused_twin.py",
    "tests/unit/kernels/test_compiled.py::test_hopper_kernels_have_their_fences",
)


FAULTS: tuple[Fault, ...] = (
    # Adapters beside frozen weights.
    Fault(
        "without sequence parallelism nobody sums the gradient of an adapter's input",
        "megatron_flux/train/lora.py",
        '"disable_grad_reduce": unsummed}',
        '"disable_grad_reduce": True}',
        ("tests/distributed/test_lora.py::test_gradients_are_those_of_one_rank",),
    ),
    Fault(
        "adapters begin beside random weights instead of the loaded ones",
        "megatron_flux/train/checkpoint.py",
        "            _load_base(trainer, checkpoint)",
        "            pass",
        ("tests/train/test_lora.py::test_adapters_on_loaded_weights",),
    ),
    # The link through host memory.
    Fault(
        "reading runs further behind than there are slots",
        "megatron_flux/comm/host_schedule.py",
        "ahead = slots - 2",
        "ahead = slots",
        (f"{PROGRAM}::test_every_order_ends_and_moves_everything",),
    ),
    Fault(
        "a slot is written before its readers have left it",
        "megatron_flux/comm/host_schedule.py",
        "for to in peers]",
        "for to in ()]",
        (f"{PROGRAM}::test_every_order_ends_and_moves_everything",),
    ),
    Fault(
        "a slot is read before it is written",
        "megatron_flux/comm/host_schedule.py",
        "for source, word in words.items()]",
        "for source, word in ()]",
        (f"{PROGRAM}::test_every_order_ends_and_moves_everything",),
    ),
    Fault(
        "a lane at work is taken for one that waits",
        "megatron_flux/comm/host_progress.py",
        "if wait is None or self._stood",
        "if self._stood",
        ("tests/unit/comm/test_host_progress.py::test_a_lane_that_is_busy_with_something_else_is_left_alone",),
    ),
    Fault(
        "a gather ends before what is sent has been read",
        "megatron_flux/comm/host_schedule.py",
        ", (Mark(DOWN), Behind((CALLER,)))\n",
        ", (Mark(UP), Behind((CALLER,)))\n",
        (f"{REPLAYS}::test_replays_among_other_calls_give_the_same_in_every_order",),
    ),
    Fault(
        "a block is sent before its product is there",
        "megatron_flux/comm/host_schedule.py",
        "[[Behind(LANES if at == 0 else (DOWN,)), ",
        "[[Behind((UP,) if at == 0 else ()), ",
        (f"{REPLAYS}::test_replays_among_other_calls_give_the_same_in_every_order",),
    ),
    Fault(
        "an event is used again before it has been waited for",
        "megatron_flux/comm/lanes.py",
        "event = self._events.pop() if self._events else self._event()",
        "event = self._between",
        (f"{REPLAYS}::test_replays_among_other_calls_give_the_same_in_every_order",),
    ),
    Fault(
        "a replayed call is not behind open calls",
        "megatron_flux/comm/host_link.py",
        "        self.lanes.mark_earlier(self._replayed_on)\n        self._replayed_on = stream\n",
        "        self._replayed_on = stream\n",
        (f"{REPLAYS}::test_replays_among_other_calls_give_the_same_in_every_order",),
    ),
    Fault(
        "a call is not behind the replay before it",
        "megatron_flux/comm/host_link.py",
        "            self.lanes.behind_earlier()\n",
        "",
        (f"{REPLAYS}::test_replays_among_other_calls_give_the_same_in_every_order",),
    ),
    Fault(
        "the caller overwrites what a replay still multiplies",
        "megatron_flux/ops/recordings.py",
        "            recording.begun.record()\n            work.finish()\n",
        "            work.finish()\n",
        (f"{REPLAYS}::test_replays_among_other_calls_give_the_same_in_every_order",),
    ),
    Fault(
        "a recording is replayed on other results",
        "megatron_flux/ops/recordings.py",
        "*[one.data_ptr() for one in work.memory])",
        "*[one.data_ptr() for one in work.memory[:2]])",
        (f"{REPLAYS}::test_replays_among_other_calls_give_the_same_in_every_order",),
    ),
    Fault(
        "open products are replayed where the GPU is behind the host",
        "megatron_flux/ops/recordings.py",
        "and not _gpu_is_close(link) and work.call.weight is not None:",
        "and False:",
        (f"{REPLAYS}::test_open_products_are_replayed_only_where_the_gpu_is_close_behind_the_host",),
    ),
    Fault(
        "calls that will be replayed count as calls that are not",
        f"{OPS}/tuner/host_bound.py",
        "    if len({turn.rows for turn in turns}) == 1:\n",
        "    if False:\n",
        ("tests/unit/ops/test_busy_turns.py::test_calls_that_will_be_replayed_take_the_host_what_a_replay_does",),
    ),
    Fault(
        "lanes of a replayed graph are not released",
        "megatron_flux/comm/host_progress.py",
        "not lanes.drained(busy)",
        "not lanes.drained([])",
        (
            "tests/unit/comm/test_host_progress.py"
            "::test_lanes_of_a_replayed_graph_are_released_though_the_links_own_streams_are_idle",
        ),
    ),
    # The link through peers' memory.
    Fault(
        "a rank sends before its round is open",
        "megatron_flux/comm/p2p_schedule.py",
        "for word in words]",
        "for word in ()]",
        (f"{P2P}::test_every_order_ends_and_moves_everything",),
    ),
    Fault(
        "the next round is opened before this one has ended",
        "megatron_flux/comm/p2p_schedule.py",
        "if use == count - 1 else ()",
        "if use == 0 else ()",
        (f"{P2P}::test_every_order_ends_and_moves_everything",),
    ),
    Fault(
        "what has not come is forwarded",
        "megatron_flux/comm/p2p_schedule.py",
        "            builder.steps += [Mark(IN), Behind((OUT,))]\n",
        "            pass\n",
        (f"{P2P}::test_every_order_ends_and_moves_everything",),
    ),
    Fault(
        "slots are open before any round",
        "megatron_flux/comm/p2p_link.py",
        "store(own + word, CLOSED)",
        "store(own + word, 0)",
        ("tests/distributed/test_host_link.py::test_everything_arrives",),
    ),
    # What ranks decide together.
    Fault(
        "kept answer is not broadcast",
        f"{OPS}/tuner/tuner.py",
        "agreement.first_rank(call.group, about, lambda: _kept(key, m))",
        "_kept(key, m)",
        (
            "tests/distributed/test_tuner.py::test_the_first_ranks_file_holds_for_all",
            "tests/distributed/test_tuner.py::test_what_ships_for_the_first_rank_holds_for_all",
        ),
    ),
    Fault(
        "what ships takes the place of what this machine has measured",
        f"{OPS}/tuner/tuner.py",
        "if _bucket(other) not in buckets} | own",
        "} | own",
        ("tests/unit/ops/test_tuner.py::test_the_own_file_counts_before_what_ships",),
    ),
    Fault(
        "what ships holds where stock may be faster than it was measured",
        f"{OPS}/tuner/shipped.py",
        '"nvls=0" in settings or " tp=2 " in kind',
        "True",
        ("tests/unit/ops/test_tuner.py::test_where_a_plan_holds_that_ships",),
    ),
    Fault(
        "while the kernel of what ships is compiled, calls run stock whatever is compiled for another m",
        f"{OPS}/tuner/tuner.py",
        "known=True, meanwhile=2, ran=[2])",
        "known=True)",
        ("tests/unit/ops/test_tuner.py::test_until_what_ships_is_compiled_calls_run_what_is_for_the_nearest_m",),
    ),
    Fault(
        "what ships keeps a machine from measuring",
        f"{OPS}/tuner/tuner.py",
        " or (full and entry.run is not None):",
        ":",
        ("tests/unit/ops/test_tuner.py::test_all_candidates_are_measured_whatever_ships",),
    ),
    Fault(
        "each m of a training is compared",
        f"{OPS}/call.py",
        "(state.table is None or len(compared.rows) < COMPARED_M)",
        "True",
        ("tests/distributed/test_fused_twin.py::test_ever_other_m_cost_no_word_between_ranks",),
    ),
    Fault(
        "each rank lists its own candidates",
        f"{OPS}/tuner/candidates.py",
        "agreement.first_rank(call.group, about, lambda: list_plans(call, full, divides))",
        "list_plans(call, full, divides)",
        ("tests/distributed/test_tuner.py::test_the_first_ranks_list_holds_for_all",),
    ),
    Fault(
        "a rank's own setting counts for its trials",
        f"{OPS}/tuner/tuner.py",
        'agreement.first_rank(group, "MEGATRON_FLUX_TUNE", tunes)',
        "tunes()",
        (f"{TRIAL}::test_ranks_of_which_one_is_late_and_one_tries_nothing_agree",),
    ),
    Fault(
        "each rank takes its own times",
        f"{OPS}/tuner/trial.py",
        "max(statistics.fmean(times), 1e-6)",
        "times[call.group.rank()]",
        (f"{TRIAL}::test_a_call_that_one_rank_has_not_waited_for_counts_on_none",),
    ),
    Fault(
        "each rank takes its own host's times",
        f"{OPS}/tuner/trial.py",
        "statistics.fmean(host)",
        "host[call.group.rank()]",
        (f"{TRIAL}::test_ranks_whose_hosts_take_different_times_choose_alike",),
    ),
    Fault(
        "a call that takes the host little counts where it was delayed alone",
        f"{OPS}/tuner/host_bound.py",
        "    for turn in turns:\n        ms",
        "    for turn in [one for one in turns if not one.busy] or turns:\n        ms",
        ("tests/unit/ops/test_busy_turns.py::test_a_call_that_finds_the_gpu_idle_where_it_was_delayed",),
    ),
    Fault(
        "a rank takes times that another one lacks",
        f"{OPS}/tuner/trial.py",
        "            if None not in by_rank:\n",
        "            if by_rank[call.group.rank()]:\n                by_rank = [one or 1.0 for one in by_rank]\n",
        (f"{TRIAL}::test_a_call_that_one_rank_has_not_waited_for_counts_on_none",),
    ),
    Fault(
        "ranks send a trial's times where they need the others'",
        f"{OPS}/tuner/trial.py",
        "if left <= self._ahead and",
        "if left == 0 and",
        (f"{TRIAL}::test_nobody_waits_for_a_rank_that_is_some_calls_late",),
    ),
    Fault(
        "kernels count as compiled that nobody was asked for when ranks said so",
        f"{OPS}/tuner/trial.py",
        "self.compiled[candidate] > self.begun[candidate]",
        "self.compiled[candidate] >= self.begun[candidate]",
        ("tests/unit/ops/test_tuner.py::test_kernels_asked_for_while_ranks_exchange_are_not_taken_for_compiled",),
    ),
    Fault(
        "a word is withdrawn that a slower peer has yet to read",
        "megatron_flux/comm/agreement.py",
        "if one < number and one not in unread",
        "if one < number",
        (f"{BOXES}::test_without_boxes_on_one_rank_all_stay_with_the_store",),
    ),
    Fault(
        "a rank writes into its box although a peer cannot read there",
        "megatron_flux/comm/agreement.py",
        "if all_can else (None, {})",
        "if mine else (None, {})",
        (f"{BOXES}::test_without_boxes_on_one_rank_all_stay_with_the_store",),
    ),
    Fault(
        "a message is read that is there in parts",
        "megatron_flux/comm/agreement.py",
        "if zlib.crc32(message, number & 0xFFFFFFFF) != checksum:",
        "if len(message) < length:",
        ("tests/unit/comm/test_boxes.py::test_a_message_that_is_seen_in_parts_is_not_there",),
    ),
    Fault(
        "a call that was broken off on one rank is kept from the others",
        f"{OPS}/tuner/trial.py",
        'agreement.of_all_ranks(one_line(broken), group, f"calls before {about}")',
        "pass",
        (f"{TRIAL}::test_a_call_that_was_broken_off_on_one_rank_is_an_error_on_all",),
    ),
    Fault(
        "a rank asks about a candidate where its peers have raised",
        f"{OPS}/tuner/trial.py",
        "except agreement.OutOfStepError:",
        "except ZeroDivisionError:",
        (f"{TRIAL}::test_a_call_that_was_broken_off_on_one_rank_is_an_error_on_all",),
    ),
    Fault(
        "a candidate runs before its kernel is compiled on all ranks",
        f"{OPS}/tuner/trial.py",
        "if all(state is True for state in found):",
        "if any(state is True for state in found):",
        (f"{TRIAL}::test_until_kernels_are_compiled_on_all_ranks_calls_run_stock",),
    ),
    Fault(
        "a candidate runs before the m that it is for has it compiled",
        f"{OPS}/tuner/trial.py",
        "self.compiled[candidate] > self.begun[candidate]",
        "self.compiled[candidate] > 0",
        (f"{TRIAL}::test_a_candidate_that_only_a_later_m_can_run_is_compiled_for_it",),
    ),
    Fault(
        "a plan from the file is compiled by the training",
        f"{OPS}/tuner/tuner.py",
        "            return self._known(call, entry)\n",
        "            return self._planned(call, entry)\n",
        (f"{TRIAL}::test_a_plan_from_the_file_runs_once_it_is_compiled",),
    ),
    Fault(
        "a candidate that fails on some ranks is dropped",
        f"{OPS}/tuner/trial.py",
        "    if len(failed) < group.size():\n",
        "    if False:\n",
        (f"{TRIAL}::test_a_first_turn_that_fails_everywhere_costs_its_candidate_and_elsewhere_the_run",),
    ),
    Fault(
        "a call that was broken off is taken for a candidate's fault",
        f"{OPS}/tuner/trial.py",
        "        slab.check()\n",
        "        pass\n",
        (f"{TRIAL}::test_a_call_that_was_broken_off_before_is_no_candidates_fault",),
    ),
    Fault(
        "a plan keeps a workspace that was replaced",
        "megatron_flux/comm/group_state.py",
        "            plan.leave(slab)\n",
        "            pass\n",
        (f"{TRIAL}::test_what_a_trial_has_bound_is_freed_with_the_workspace",),
    ),
    Fault(
        "times count in which the GPU waited for the host",
        f"{OPS}/tuner/trial.py",
        "effects_of(self._telling())",
        "effects_of(self.timed)",
        ("tests/unit/ops/test_busy_turns.py::test_turns_in_which_the_gpu_was_busy_count_alone",),
    ),
    Fault(
        "a kernel runs with the rows of the call before",
        "megatron_flux/kernels/launch.py",
        "            if rows is not self._rows:\n",
        "            if self._rows is self.first:\n",
        ("tests/unit/kernels/test_compiled.py::test_launches_lay_parameters_out_as_the_kernels_want_them",),
    ),
    Fault(
        "a capture takes what the file has",
        f"{OPS}/tuner/tuner.py",
        "            entry = self._met(call)\n",
        "            entry = self._looked_up(call)\n",
        ("tests/unit/ops/test_tuner.py::test_capture_tries_nothing_reads_nothing_and_remembers_nothing",),
    ),
    Fault(
        "all_agree asks nobody",
        f"{OPS}/timing.py",
        "all(of_all_ranks(mine, group, about))",
        "mine",
        (f"{LATE}::test_all_agree_only_if_every_rank_does",),
    ),
    Fault(
        "fastest rank in bursts",
        f"{OPS}/timing.py",
        "dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)",
        "dist.all_reduce(slowest, op=dist.ReduceOp.MIN, group=group)",
        (f"{LATE}::test_bursts_and_rounds_take_as_long_as_on_the_slowest_rank",),
    ),
    Fault(
        "rounds forget the other ranks",
        f"{OPS}/timing.py",
        "    ms = {name: _slowest(bursts, group, device) for name, bursts in times.items()}\n",
        "    ms = {name: torch.tensor(bursts) for name, bursts in times.items()}\n",
        (f"{LATE}::test_bursts_and_rounds_take_as_long_as_on_the_slowest_rank",),
    ),
    Fault(
        "step time of rank 0",
        "megatron_flux/train/record.py",
        "local.lr, max(seconds),",
        "local.lr, seconds[0],",
        (RECORD,),
    ),
    Fault(
        "tokens of a micro-batch",
        "megatron_flux/train/record.py",
        "config.tokens_per_step / result",
        "config.tokens_per_step / config.micro_batches / result",
        (RECORD,),
    ),
    Fault(
        "a resumed run is warm",
        "megatron_flux/train/record.py",
        "self._warm_after = begin + ",
        "self._warm_after = ",
        (RECORD,),
    ),
    Fault(
        "fallbacks of the last start alone",
        "megatron_flux/metrics/summary.py",
        'if following is None or following.get("flux/run")',
        "if following is None",
        ("tests/unit/metrics/test_summary.py::test_fallbacks_of_all_starts_are_counted",),
    ),
    Fault(
        "a key of calls that start together like any other",
        f"{OPS}/tuner/keys.py",
        "' together' if",
        "'' if",
        ("tests/unit/ops/test_tuner_cache.py::test_every_part_of_a_key_changes_with_what_it_stands_for",),
    ),
    Fault(
        "a key without torch's version",
        f"{OPS}/tuner/keys.py",
        "torch {torch.__version__} ",
        "torch ",
        ("tests/unit/ops/test_tuner_cache.py::test_every_part_of_a_key_changes_with_what_it_stands_for",),
    ),
    Fault(
        "90 % interval for 95 %",
        "megatron_flux/metrics/summary.py",
        "[2.5, 97.5]",
        "[5, 95]",
        ("tests/unit/metrics/test_summary.py::test_the_interval_is_a_95_percent_one",),
    ),
    Fault(
        "calls beside other groups start as they come",
        "megatron_flux/comm/links.py",
        "there.others and not settings.one_queue()",
        "False",
        ("tests/unit/comm/test_beside.py::test_the_rule",),
    ),
    Fault(
        "a kernel starts before its peers have come",
        f"{OPS}/fused.py",
        "self._holds_sms and links.starts_together(call.group, captured=self._captured)",
        "False",
        (f"{LATE}::test_kernels_that_hold_sms_wait_for_the_last_rank_before_they_start",),
    ),
    Fault(
        "tiles of a CTA that finds no SM stay",
        "megatron_flux/kernels/plain.py",
        "        share = _left(ctrl + 2, gemm_ctas, epoch)",
        "        share = gemm_ctas",
        ("tests/distributed/test_late_ranks.py::test_one_cta_computes_the_tiles_of_those_that_do_not_start",),
    ),
    Fault(
        "stock layers do not end a prefetch",
        "megatron_flux/patch/linears.py",
        "        prefetch.clear()\n",
        "",
        ("tests/distributed/test_stock_layers.py::test_a_stock_layer_ends_a_prefetch",),
    ),
    Fault(
        "a row layer without gradients leaves a pair behind",
        "megatron_flux/layers/linears.py",
        "        state_of(group).column = None\n        operand, multiplied, *_ =",
        "        operand, multiplied, *_ =",
        ("tests/distributed/test_gather_ahead.py::test_no_pairs_with_layers_that_gather",),
    ),
    Fault(
        "dgrad's sum is tuned as if nothing ran beside it",
        "megatron_flux/patch/tuning.py",
        '"async_op": wanted.beside_wgrad',
        '"async_op": False',
        ("tests/distributed/test_tune_ahead.py::test_the_first_step_finds_every_answer",),
    ),
    # Norm outputs that adapters read.
    Fault(
        "the gradient of a gathered norm output is dropped",
        "megatron_flux/layers/linears.py",
        "addend, d_norm_output = rows(d_norm_output), None",
        "addend, d_norm_output = None, None",
        ("tests/distributed/test_norm_output.py::test_gradients_are_those_of_tp_1",),
    ),
    Fault(
        "what a caller owns lies in memory that later calls write to",
        f"{OPS}/fused.py",
        "                own.copy_(views.gathered)\n",
        "                own = views.gathered\n",
        ("tests/distributed/test_norm_output.py::test_other_backends",),
    ),
    Fault(
        "a fused kernel leaves the addend out",
        f"{KERNELS}/plain.py",
        "acc += tl.load(addend + at,",
        "acc += 0 * tl.load(addend + at,",
        ("tests/distributed/test_ops.py::test_exact",),
    ),
    # Adapters that run as one function.
    Fault(
        "a rank's part of b's gradient is taken for the sum",
        "megatron_flux/layers/adapter.py",
        "[:, :own].sum(0)",
        "[:, :own][0]",
        ("tests/distributed/test_adapted.py::test_gradients_are_those_of_tp_1",),
    ),
    Fault(
        "without sequence parallelism an adapter's dx is of the rank's columns of A alone",
        "megatron_flux/layers/adapter.py",
        "                a = ops.all_gather(a, adapter.group, backend=adapter.backends.dgrad).wait()\n"
        "                mine = dlow\n",
        "                pass\n",
        ("tests/distributed/test_adapted.py::test_gradients_are_those_of_tp_1",),
    ),
    Fault(
        "a row-parallel linear keeps its adapter's dx for the next backward",
        "megatron_flux/layers/linears.py",
        "low_rank, linear.low_rank = linear.low_rank, None",
        "low_rank, linear.low_rank = None, linear.low_rank",
        ("tests/distributed/test_adapted.py::test_gradients_are_those_of_tp_1",),
    ),
    Fault(
        "an adapter reads parameters before they have arrived",
        "megatron_flux/patch/adapters.py",
        "hook(module, ())",
        "pass",
        ("tests/distributed/test_adapted.py::test_linears_run_where_more_is_asked_for",),
    ),
    Fault(
        "an adapter's dx is summed although nobody asked for it",
        "megatron_flux/patch/linears.py",
        'reduce_dgrad=kwargs["allreduce_dgrad"]',
        "reduce_dgrad=True",
        ("tests/distributed/test_layers.py::test_patched_equals_stock",),
    ),
    Fault(
        "a delayed wgrad keeps memory of the group",
        "megatron_flux/layers/precision.py",
        "return self.delayed is not None\n",
        "return False\n",
        (
            "tests/distributed/test_delayed_wgrad.py::test_nothing_of_the_groups_memory_is_kept",
            "tests/distributed/test_delayed_wgrad.py::test_fp8_on_fused_kernels",
        ),
    ),
    Fault(
        "a deferred wgrad is computed in backward as well",
        "megatron_flux/layers/linears.py",
        "        need_dw = need_dw and not deferred\n",
        "",
        ("tests/distributed/test_stock_layers.py::test_dy_is_left_for_megatron",),
    ),
    Fault(
        "an early gather for a delayed wgrad is made again",
        "megatron_flux/layers/prefetch.py",
        "stays = self.own_gathered or self._begun",
        "stays = self._begun",
        ("tests/distributed/test_delayed_wgrad.py::test_two_layers",),
    ),
    Fault(
        "a frozen layer saves its input",
        "megatron_flux/layers/precision.py",
        "x if weight.requires_grad else None, weight)",
        "x, weight)",
        ("tests/distributed/test_te_fp8.py::test_no_input_is_saved",),
    ),
    # Epochs, flags and workspaces.
    Fault(
        "plain kernels compare epochs without wrapping",
        f"{KERNELS}/device.py",
        "ahead = tl.load(flags + lane, mask=lane < count, other=0, volatile=True) - epoch",
        "ahead = tl.where(tl.load(flags + lane, mask=lane < count, other=0, volatile=True) < epoch, -1, 0)",
        (f"{LATE}::test_a_late_rank_is_waited_for_however_many_calls_there_were",),
        ("wrapping_plain",),
    ),
    Fault(
        "entered calls compare epochs without wrapping",
        f"{KERNELS}/device.py",
        "second - first > 0",
        "second > first",
        (f"{TWIN}::test_epochs_may_wrap",),
    ),
    Fault(
        "flags of a graph's slab are not written anew",
        f"{KERNELS}/device.py",
        ">> REFRESH_BITS) != 0:",
        ">> REFRESH_BITS) > 1:",
        (f"{LATE}::test_a_late_rank_is_waited_for_however_many_calls_there_were",),
        ("worn_out",),
    ),
    Fault(
        "a slab is used for ever",
        "megatron_flux/comm/group_state.py",
        " and old.calls < old.limit",
        "",
        (f"{LATE}::test_a_late_rank_is_waited_for_however_many_calls_there_were",),
        ("worn_out",),
    ),
    Fault(
        "plain kernels do not wait",
        f"{KERNELS}/device.py",
        "behind = tl.min(tl.where(lane < count, ahead, 0))",
        "behind = tl.min(tl.where(lane < count, 0, 0))",
        (f"{LATE}::test_every_transport_waits_for_a_late_rank",),
        ("late_plain",),
    ),
    Fault(
        "kernels do not advance the epoch",
        f"{KERNELS}/device.py",
        "tl.store(epochs + next_slot, epoch + 1)",
        "tl.store(epochs + next_slot, epoch)",
        (f"{LATE}::test_every_transport_waits_for_a_late_rank",),
        ("late_plain", "late_hopper"),
    ),
    Fault(
        "captured calls do not meet",
        f"{KERNELS}/device.py",
        "    wait_flags(flags, TP, TP, epoch, err, limit, OP_ENTER, -1, 0, CPU, THREADS)\n",
        "",
        (f"{TWIN}::test_captured_gather_stays_open_beside_captured_gemms",),
    ),
    Fault(
        "flag of a step goes to another peer than its data",
        "megatron_flux/comm/copy_engine.py",
        "work.flags[peer].data_ptr() + 4 * (word + piece)",
        "work.flags[(rank + step) % tp].data_ptr() + 4 * (word + piece)",
        ("tests/unit/comm/test_copy_engine.py::test_a_flag_follows_its_data_to_the_same_peer",),
    ),
    Fault(
        "one SM adds what all others multiply",
        f"{OPS}/kernel_config.py",
        "sms - fewest >= MIN_REDUCER_SMS",
        "fewest < sms",
        ("tests/unit/ops/test_plan.py::test_sms_that_no_round_needs_add_partials",),
    ),
    Fault(
        "a destroyed group's state is kept",
        "megatron_flux/comm/group_state.py",
        "weakref.finalize(group, _states.pop, key, None)",
        "weakref.finalize(state, _states.pop, key, group)",
        (
            f"{LATE}::test_a_group_made_again_under_the_same_name_starts_clean",
            "tests/unit/comm/test_group_state.py::test_a_state_belongs_to_one_group_whatever_its_name_and_goes_with_it",
        ),
    ),
    Fault(
        "ready calls do not follow a change of stream",
        "megatron_flux/comm/slab.py",
        "        if raw != self._order.raw:\n            self._order.follow()\n        half",
        "        half",
        ("tests/unit/comm/test_slab.py::test_eager_calls_follow_a_change_of_stream",),
        ("stream_change",),
    ),
    Fault(
        "a gather is waited for before the streams are in order",
        f"{OPS}/fused_gather.py",
        "                    else:\n                        work.end()\n",
        "                    else:\n                        pass\n",
        (f"{PLANS}::test_a_gather_waited_for_on_another_stream_first_puts_the_streams_in_order",),
        ("across_streams",),
    ),
    Fault(
        "calls of all dtypes have one plan",
        f"{OPS}/call.py",
        "x.shape, x.dtype, device,",
        "x.shape, None, device,",
        ("tests/unit/ops/test_call_spec.py::test_another_call_has_another_spec",),
        ("kinds",),
    ),
    Fault(
        "a benchmark stops by another clock than the first rank's",
        "megatron_flux/bench/harness.py",
        "time.monotonic() - began > seconds, here.ranks)[0]",
        "time.monotonic() - began > seconds, here.ranks)[-1]",
        ("tests/distributed/test_bench_ops.py::test_the_first_rank_s_clock_stops_all",),
    ),
    # Fences: what is missing is seen in the compiled code, without a GPU and with one.
    Fault(
        "plain kernels have no fence behind a poll",
        f"{KERNELS}/device.py",
        '"fence.acq_rel.sys;" + ',
        "",
        (PLAIN_FENCES,),
    ),
    Fault(
        "plain kernels have no fence between proxies",
        f"{KERNELS}/device.py",
        '" fence.proxy.async;" if',
        '"" if',
        (PLAIN_FENCES,),
    ),
    Fault(
        "plain kernels have no fence before a flag",
        f"{KERNELS}/device.py",
        '_each_thread("fence.acq_rel.sys;", THREADS)',
        "pass",
        (PLAIN_FENCES,),
    ),
    Fault(
        "plain kernels publish before their stores have arrived",
        f"{KERNELS}/device.py",
        '_each_thread("cp.async.bulk.wait_group 0;", THREADS)',
        "pass",
        (PLAIN_FENCES,),
    ),
    Fault(
        "plain kernels ask GPUs before Hopper for its instructions",
        f"{KERNELS}/device.py",
        "if not CPU and cuda_capability_geq(9, 0):",
        "if not CPU:",
        (PLAIN_FENCES,),
    ),
    # Warp-specialised kernels: these run on GPUs only.
    Fault(
        "Hopper kernels do not wait",
        f"{KERNELS}/hopper/pieces.py",
        "behind = gl.min(_acquire(flags + lane) - epoch, axis=0)",
        "behind = gl.min(lane, axis=0)",
        (FENCES,),
        ("late_hopper",),
    ),
    Fault(
        "Hopper kernels compare epochs without wrapping",
        f"{KERNELS}/hopper/pieces.py",
        "behind = gl.min(_acquire(flags + lane) - epoch, axis=0)",
        "behind = gl.min(gl.where(_acquire(flags + lane) < epoch, lane * 0 - 1, lane * 0), axis=0)",
        checks=("wrapping_hopper",),
    ),
    Fault(
        "Hopper AG+GEMM does not wait for what the copy engine brings",
        f"{KERNELS}/hopper/ag_gemm.py",
        "if flag != arrived:",
        "if flag < 0:",
        checks=("late_hopper",),
    ),
    Fault(
        "Hopper GEMM+RS waits for an earlier tile",
        f"{KERNELS}/hopper/gemm_rs.py",
        "wait_flags(flags + flag_off + tile * TP, TP, epoch,",
        "wait_flags(flags + flag_off + tile * TP, TP, epoch - 2,",
        checks=("late_hopper",),
    ),
    Fault(
        "a part of a tile's product says that its sums are there before they are",
        f"{KERNELS}/hopper/split_k.py",
        "        barrier()\n        each_thread(FENCE_SYSTEM, epoch)\n",
        "",
        (FENCES,),
    ),
    Fault(
        "the last part of a tile's product does not wait for the others",
        f"{KERNELS}/hopper/split_k.py",
        "for part in range(all_parts - 1):\n            wait_flags",
        "for part in range(all_parts - parts):\n            wait_flags",
        checks=("late_hopper",),
    ),
    Fault(
        "the first part of a tile's product waits for parts that other CTAs may never begin",
        f"{KERNELS}/hopper/split_k.py",
        "hands_over = part == parts - 1",
        "hands_over = part == 0",
        ("tests/unit/kernels/test_split_k.py::test_parts_cover_every_tile",),
    ),
    Fault(
        "Hopper kernels poll without acquire",
        f"{KERNELS}/hopper/pieces.py",
        "ld.acquire.sys.global.b32",
        "ld.relaxed.sys.global.b32",
        (FENCES,),
    ),
    Fault(
        "promoted sums may be put off past the next product",
        f"{KERNELS}/hopper/scaled.py",
        'first = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [first], gl.float32, is_pure=False, pack=1)',
        "pass",
        ("tests/unit/kernels/test_compiled.py::test_hopper_kernels_run_at_full_speed",),
    ),
    Fault(
        "a team frees a slot between two promoted products",
        f"{KERNELS}/hopper/scaled.py",
        "        slot = following\n    barrier()",
        "        slot = following\n        barrier()",
        ("tests/unit/kernels/test_compiled.py::test_nothing_is_waited_for_between_two_promoted_products",),
    ),
    Fault(
        "Hopper kernels have no fence between proxies",
        f"{KERNELS}/hopper/pieces.py",
        '"fence.proxy.async;"',
        '""',
        (FENCES,),
    ),
    Fault(
        "Hopper kernels have no fence of the system",
        f"{KERNELS}/hopper/pieces.py",
        '"fence.acq_rel.sys;"',
        '""',
        (FENCES,),
    ),
    Fault(
        "Hopper GEMM+RS publishes before its stores have arrived",
        f"{KERNELS}/hopper/gemm_rs.py",
        "                each_thread(STORES_DONE, epoch)\n",
        "",
        (FENCES,),
    ),
    # FP8.
    Fault(
        "scales of a shard are not sent",
        "megatron_flux/comm/copy_engine.py",
        "ctypes.memmove(scales_to, scales, self.scale_bytes)",
        "pass",
        (f"{FP8}::test_fused_is_exact_on_two_ranks",),
    ),
    Fault(
        "a call does not send the scales of its shard",
        f"{OPS}/fused.py",
        "scales = fp8.x.scale_inv.data_ptr()",
        "scales = 0",
        (f"{PLANS}::test_fp8_travels_with_its_scales",),
    ),
    Fault(
        "every shard is scaled as the own one",
        f"{KERNELS}/plain.py",
        "by_row += src * tl.cdiv(k, 128) * ld + pm * BM",
        "by_row += rank * tl.cdiv(k, 128) * ld + pm * BM",
        (f"{FP8}::test_fused_is_exact_on_two_ranks",),
    ),
    Fault(
        "the tuner keeps one answer for sums that are promoted and sums that are not",
        f"{OPS}/fp8_operand.py",
        "return Fp8Kind(self.x.dtype, self.weight.dtype, self.x.scaling, self.out, self.promoted)",
        "return Fp8Kind(self.x.dtype, self.weight.dtype, self.x.scaling, self.out, False)",
        ("tests/distributed/test_tuner.py::test_fp8_is_decided_by_how_it_is_scaled_and_added_up",),
    ),
    Fault(
        "sums of FP8 stay in the tensor core",
        f"{KERNELS}/device.py",
        "acc = tl.dot(x, y, acc, max_num_imprecise_acc=BK)",
        "acc = tl.dot(x, y, acc)",
        ("tests/unit/kernels/test_compiled.py::test_sums_of_fp8_are_promoted",),
    ),
    Fault(
        "a shard is transposed into the columns of another rank",
        f"{OPS}/fused_gather.py",
        "[:, work.rank * mp : (work.rank + 1) * mp]",
        "[:, :mp]",
        (f"{FP8}::test_shards_are_transposed_into_their_places",),
    ),
    Fault(
        "a gathered dy lies where the next layer's x is gathered",
        f"{OPS}/fused_gather.py",
        'self.purpose = "held gather" if call.async_op else "gather"',
        'self.purpose = "gather"',
        (f"{FP8}::test_shards_are_transposed_into_their_places",),
    ),
    Fault(
        "copies that are held share the link with those that dgrad waits for",
        "megatron_flux/comm/copy_engine.py",
        "stream = work.streams.get(work.captured)",
        "stream = None",
        ("tests/unit/comm/test_copy_engine.py::test_slabs_of_a_group_share_the_stream_of_their_copies",),
    ),
    Fault(
        "a dy that is held is sent when wgrad asks for it",
        "megatron_flux/layers/linears.py",
        "                pending.send()\n",
        "                pass\n",
        (f"{TE_LAYERS_FP8}::test_a_dy_is_held_until_dgrads_is_sent",),
    ),
    Fault(
        "a gather that is held begins at once",
        f"{OPS}/fused_gather.py",
        "            if not held:\n                push.send",
        "            if True:\n                push.send",
        (f"{PLANS}::test_a_gather_that_is_held_is_sent_behind_what_was_sent_since",),
    ),
    # TransformerEngine's layers in FP8.
    Fault(
        "gradients' scales are never updated",
        f"{TE_FP8}.py",
        "self._te.state.reduce_and_update_fp8_tensors(forward=False)",
        "pass",
        (f"{TE_LAYERS_FP8}::test_patched_equals_stock",),
    ),
    Fault(
        "a cached weight outlives its step",
        f"{TE_FP8}.py",
        '"update_workspace": first is None or first',
        '"update_workspace": first is None',
        (f"{TE_LAYERS_FP8}::test_patched_equals_stock",),
    ),
    Fault(
        "recomputed layers take the update of scales from the first one",
        f"{TE_FP8}.py",
        "setattr(state, name, before)",
        "pass",
        (f"{TE_LAYERS_FP8}::test_two_layers",),
    ),
    Fault(
        "forward's sums are split and dgrad's are not",
        f"{TE_FP8}.py",
        "split_forward, split_dgrad, self._wgrad_split =",
        "split_dgrad, split_forward, self._wgrad_split =",
        (f"{TE_LAYERS_FP8}::test_what_is_multiplied_is_stocks_to_the_bit",),
    ),
    Fault(
        "scales of blocks are those of the rank alone",
        "megatron_flux/layers/fp8.py",
        "self._scale_inv if self._scales is None else self._scales.wait()",
        "self._scale_inv.repeat(2, 1)",
        (f"{TE_LAYERS_FP8}::test_patched_equals_stock",),
    ),
    Fault(
        "a graph quantises the weight in every micro-batch",
        f"{TE_FP8}.py",
        '"skip_update_flag": skip',
        '"skip_update_flag": None if skip is None else torch.zeros_like(skip)',
        (f"{TE_LAYERS_FP8}::test_as_captured_in_a_cuda_graph",),
    ),
    Fault(
        "NCCL gathers scales beside a kernel that waits for its peers",
        "megatron_flux/layers/linears.py",
        "linear.settle()",
        "pass",
        (f"{TE_LAYERS_FP8}::test_nccl_never_waits_for_sms_beside_fused_kernels",),
    ),
    Fault(
        "tuning ahead updates scales",
        "megatron_flux/patch/tuning.py",
        "with torch.no_grad(), get_fp8_context(layer.config, number), torch.set_grad_enabled(grad):",
        "with get_fp8_context(layer.config, number), torch.set_grad_enabled(grad):",
        ("tests/distributed/test_tune_ahead_fp8.py::test_the_first_step_finds_every_answer",),
    ),
    # Decoding.
    Fault(
        "an all-reduce takes the plan of one beside wgrad",
        f"{OPS}/call.py",
        "async_op, wire, None if fp8",
        "False, wire, None if fp8",
        (f"{PLANS}::test_gemm_all_reduce_is_one_launch",),
    ),
    Fault(
        "an all-reduce that fails leaves its slab good",
        f"{OPS}/fused.py",
        'work.poison("gemm_all_reduce", error)',
        "pass",
        (f"{PLANS}::test_a_call_broken_off_poisons_its_slab",),
    ),
    Fault(
        "a decode step runs the plan of rows far away",
        f"{OPS}/tuner/tuner.py",
        "[other for other in self.known if _bucket(other) == bucket]",
        "[*self.known]",
        ("tests/unit/ops/test_tuner.py::test_decode_steps_of_other_rows_run_the_nearest_plan",),
    ),
    Fault(
        "a training waits for a kernel of the other width",
        f"{OPS}/tuner/tuner.py",
        "if not self._tries(call.group) or (alike, entry.plan) in decisions.at_once:",
        "if decisions:",
        ("tests/unit/ops/test_tuner.py::test_the_other_width_of_tiles_runs_once_it_is_compiled",),
    ),
    Fault(
        "a rank frees workspaces that its peers keep",
        "megatron_flux/layers/release.py",
        'of_all_ranks(mine, world, "freeing workspaces")',
        "[mine]",
        ("tests/distributed/test_release.py::test_all_ranks_refuse_and_free_nothing",),
    ),
    Fault(
        "wgrad takes a shard for the gathered input that was released",
        "megatron_flux/layers/prefetch.py",
        "if self.kept is not None and self.kept.gathered is None:",
        "if False:",
        ("tests/distributed/test_release.py::test_backward_gathers_what_was_kept",),
    ),
    Fault(
        "a layer of flux_spec goes past another library's method",
        "megatron_flux/patch/spec.py",
        "if now is stock:",
        "if True:",
        (
            "tests/distributed/test_spec.py::test_another_librarys_method_on_the_base_is_called_with_its_name_as_the_reason",
        ),
    ),
    Fault(
        "a decode step does not read the cache that was filled",
        "megatron_flux/bench/variants.py",
        "inference_context=context),)",
        "),)",
        ("tests/distributed/test_bench_layer.py::test_a_decode_step_is_that_of_megatron_core_s_cache",),
    ),
    # ZeRO-3 beside tensor parallelism.
    Fault(
        "every rank of a tensor-parallel group trains the same sequences by FSDP",
        "megatron_flux/train/fsdp.py",
        '("_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP_WITH_CP")',
        '("_DATA_PARALLEL_GROUP_WITH_CP",)',
        ("tests/train/test_training.py::test_losses_are_those_of_the_baseline",),
    ),
    Fault(
        "FSDP's weights are not those of the baseline",
        "megatron_flux/train/fsdp.py",
        "zip(*(p.chunk(halves, dim) for p in parts), strict=True)",
        "zip(*(p.chunk(halves, dim) for p in parts[::-1]), strict=True)",
        ("tests/distributed/test_bench_layer.py::test_results_are_those_of_tensor_parallelism",),
    ),
    Fault(
        "a layer's weights are not freed behind its forward",
        "megatron_flux/train/fsdp.py",
        "reshard_after_forward=unit in layers",
        "reshard_after_forward=False",
        ("tests/distributed/test_bench_layer.py::test_a_step_gathers_every_weight_twice_and_scatters_its_gradient",),
    ),
    Fault(
        "a small kernel that is compiled early has another limit",
        f"{OPS}/early.py",
        "limit = 1 << 40",
        "limit = 1 << 20",
        ("tests/unit/ops/test_early.py::test_calls_launch_what_was_compiled",),
    ),
    Fault(
        "tiles that two teams share change their width",
        f"{OPS}/tuner/candidates.py",
        "if may_divide(call) or (call.fp8 is not None and call.fp8.promoted):",
        "if may_divide(call) or (call.fp8 is not None and call.fp8.blocks):",
        ("tests/unit/ops/test_plan.py::test_only_fp8_gets_the_other_width_and_not_where_two_teams_share_a_tile",),
    ),
    Fault(
        "wrong bytes are a fast link", "megatron_flux/ops/timing.py", "if not torch.equal", "if 0 * torch.equal", LINKS
    ),
    Fault("the fastest rank is the link's", _PREFLIGHT, "min(_from_all(mine))", "max(_from_all(mine))", LINKS),
    Fault(
        "a wait for peers' memory has no limit",
        _PREFLIGHT,
        "faulthandler.dump_traceback_later(2 * _LINK_S, exit=True)",
        "faulthandler.dump_traceback_later(2 * _LINK_S)",
        LINKS,
    ),
)


def broken(root: Path, fault: Fault) -> str | None:
    """None, or why ``fault`` cannot be put into the checkout at ``root``."""
    path = root / fault.file
    if not path.is_file():
        return f"fault no longer applies: there is no {fault.file}"
    found = path.read_text().count(fault.old)
    if found != 1:
        return f"fault no longer applies: {fault.old!r} occurs {found} times in {fault.file}, not once"
    return f"fault changes nothing in {fault.file}" if fault.old == fault.new else None


def apply(root: Path, fault: Fault) -> None:
    """Put ``fault`` into the checkout at ``root``."""
    path = root / fault.file
    path.write_text(path.read_text().replace(fault.old, fault.new))
