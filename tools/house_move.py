#!/usr/bin/env python3
"""Moves the sources into the folders that show the architecture, for the time of the move.

    tools/house_move.py             moves the files that still lie in their old places, then rewrites what names them
    tools/house_move.py --includes  only rewrites includes, CMake lists and documents, as after a merge

It can be run again: what has been moved stays, and a path that still exists is not rewritten.
"""

import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# folder -> stems of the files (every suffix) that move from the layer's top into it.
FOLDERS = {
    "base": {
        "trace": "nvtx_absent nvtx_ranges trace_clock trace_format trace_ranges trace_ring trace_writer",
    },
    "gpu": {
        "device": "host_call_queue host_event host_stream memory_ledger",
        "math": "device_math device_math_over kernel_elements math_bodies",
        "cuda": "cuda_absent cuda_copies cuda_current_device cuda_devices cuda_environment cuda_error "
                "cuda_math cuda_memory kernel_list",
        "ranks": "cuda_exchanged_sum exchanged_sum host_collectives host_exchange host_neighbors integer_reduction "
                 "local_collectives message_thread mpi_collectives mpi_port mpi_port_plugin nccl_absent "
                 "nccl_collectives nccl_communicator nccl_watch rank_failure rank_reduction rank_wait shared_segment",
    },
    "engine": {
        "config": "config config_document config_schema_check model_spec",
        "plan": "activation_plan host_memory layout parameter_groups placement placement_budget placement_host "
                "placement_planner pool_meter schedule sharding step_plans striping traffic update_policy window_plan "
                "window_retreat",
        "bound": "bound bound_simulation simulated_machine simulated_pass simulated_slots simulated_spill step_cost",
        "run": "engine_trace scheduler step_timeline task_thread work_meter worker",
        "ranks": "rank_clocks rank_sequence ranks",
        "store": "block_store integrity state_access storage_queue tiers transfer_ages transfer_watch",
        "flow": "activation_flow activation_trace block_update device_updates gradient_drain gradient_norm "
                "gradient_on_device gradient_spill optimizer_lane optimizer_pass parameter_slots prefetcher "
                "resident_units update_order waiting_gradients",
        "step": "loss_scaler step step_course step_failure step_finish step_loop",
    },
    "tools": {
        "cli": "exit_codes file_place interrupt option_checks option_files output_file print temporary_file",
        "report": "plan_rates rank_memory safetensors safetensors_header stage_table state_hash step_limits step_log",
        "trace": "interval_set trace_advice trace_analysis trace_causes trace_diff trace_engine trace_export "
                 "trace_html trace_lanes trace_open_spans trace_page trace_ranks trace_rates trace_reader "
                 "trace_session trace_steps trace_summary trace_whatif",
        "gpt/train": "dataset device_trainer model_file order_choice rank_world run_memory stream_guard train_config "
                     "train_report trainer training training_device",
        "bench": "bench_adam gpu_bench io_bench step_bench step_regimes",
        "commands": "bench_adam_command bench_gpu_command bench_io_command bench_step_command doctor_command "
                    "generate_command plan_command trace_command trace_options train_command",
    },
    "tools/gpt": {
        "model": "activations attention compute_threads counter_random cublaslt cuda_ops cuda_ops_absent device_bodies "
                 "device_gpt device_gpt_attention device_gpt_backward device_gpt_warm_up device_ops device_ops_over "
                 "gpt_backward gpt_compute gpt_config gpt_model layers matmul row_kernels sampling slow_products "
                 "unit_tensors",
    },
    "tests/base": {"trace": "trace_test"},
    "tests/engine": {
        "config": "config_document_test model_spec_test",
        "plan": "activation_plan_test budget_test host_memory_test layout_test parameter_groups_test placement_test "
                "schedule_test striping_plan_test window_optimum_test window_plan_test",
        "bound": "bound_model bound_test job_table oracle_slots schedule_oracle simulated_order_test",
        "ranks": "device_shard_test engine_ranks_test hybrid_sharding_test keep_gathered_test many_ranks_test "
                 "nccl_engine_test rank_clocks_test rank_fault_program rank_faults rank_threads sharding_cases "
                 "sharding_mpi_test sharding_test",
        "run": "scheduler_test",
        "store": "fault_matrix_test integrity_test shutdown_test storage_backend_test storage_fault_test "
                 "storage_timeout_test striping_test",
        "flow": "activation_flow_test device_state_test gradient_spill_test overlap_policy_test overlap_test "
                "pool_marks_test scheduler_fuzz_test update_order_test",
        "step": "loss_scale_engine_test loss_scaler_test schedule_change_test",
    },
    "tests/gpu": {
        "device": "host_device_test memory_ledger_test",
        "math": "device_math_cases device_math_test optimizer_math_cuda_test optimizer_math_kernels",
        "cuda": "cuda_device_fake_test cuda_device_test cuda_math_test fake_cuda_kernels fake_cuda_runtime",
        "ranks": "fake_mpi_plugin fake_nccl fake_nccl_world host_exchange_test integer_reduction_test "
                 "local_collectives_test mpi_collectives_test mpi_world_test nccl_collectives_fake_test "
                 "nccl_collectives_test",
    },
    "tests/tools": {
        "trace": "interval_set_test trace_builder trace_causes_test trace_collectives_test trace_engine_test "
                 "trace_file_test trace_html_test trace_open_spans_test trace_whatif_test",
        "train": "cuda_trainer_test dataset_test device_trainer_cases device_trainer_test model_file_test "
                 "rank_gradients_test small_gpt stage_memory_test step_timeline_test train_config_test trainer_test",
        "report": "safetensors_test sha256 state_hash_test",
    },
}
# Files whose name misled: old -> new.
RENAMES = {
    "base/host_device.h": "base/device_function.h",
    "base/trace.cc": "base/trace/trace.cc",
    "base/trace.h": "base/trace/trace.h",
    "gpu/host_device.cc": "gpu/device/host_device.cc",
    "gpu/cuda_device.cc": "gpu/cuda/cuda_device.cc",
    "gpu/host_launch.h": "gpu/math/host_launcher.h",
    "gpu/cuda_launch.h": "gpu/cuda/cuda_launcher.h",
    "gpu/launch.h": "gpu/ranks/launcher_environment.h",
    "gpu/launch.cc": "gpu/ranks/launcher_environment.cc",
    "tests/gpu/launch_test.cc": "tests/gpu/ranks/launcher_environment_test.cc",
    "tests/tools/gpu_bench_test.cc": "tests/tools/bench/gpu_bench_test.cc",
    "tests/tools/doctor_test.cc": "tests/tools/commands/doctor_test.cc",
    "tests/tools/output_file_test.cc": "tests/tools/cli/output_file_test.cc",
    "cpu_optim/ordered_sum.h": "cpu_optim/rank_sum.h",
    "cpu_optim/ordered_sum.cc": "cpu_optim/rank_sum.cc",
    "tests/cpu_optim/ordered_sum_test.cc": "tests/cpu_optim/rank_sum_test.cc",
    "tools/planner.h": "engine/planner/planner.h",
    "tools/planner.cc": "engine/planner/planner.cc",
    "tools/planning.h": "engine/planner/plan_subject.h",
    "tools/planning.cc": "engine/planner/plan_subject.cc",
    "tools/compute_factor.h": "engine/planner/compute_factor.h",
    "tools/compute_factor.cc": "engine/planner/compute_factor.cc",
    "tools/phase_memory.h": "engine/planner/phase_memory.h",
    "tools/phase_memory.cc": "engine/planner/phase_memory.cc",
}
# Public headers: included as <sluice/NAME.h>.
PUBLIC = {
    "base": "device_function dtype error ids units",
    "gpu": "collectives cuda_device device host_device",
    "engine": "engine",
    "engine/config": "config config_document model_spec",
    "engine/step": "step",
}
TEXT = {".h", ".cc", ".cu", ".py", ".sh", ".cmake", ".in", ".txt", ".md", ".json", ".supp", ".html", ".yml"}


def tracked(*arguments):
    output = subprocess.run(["git", "ls-files", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return output.stdout.splitlines()


def moves():
    """old path -> new path of every file, whether it has been moved or not."""
    result = dict(RENAMES)
    suffixes = [".h", ".cc", ".cu", ".html", ".py"]
    for layer, folders in FOLDERS.items():
        for folder, stems in folders.items():
            for stem in stems.split():
                for suffix in suffixes:
                    old, new = f"{layer}/{stem}{suffix}", f"{layer}/{folder}/{stem}{suffix}"
                    if (ROOT / old).exists() or (ROOT / new).exists():
                        result[old] = new
    return result


def public_headers():
    """old path -> new path of the public headers."""
    return {f"{folder}/{name}.h": f"{folder.split('/')[0]}/include/sluice/{name}.h"
            for folder, names in PUBLIC.items() for name in names.split()}


def with_public_includes(text):
    """Includes of public headers in their form, at the head of their block."""
    public = public_headers()
    text = re.sub(r'#include "([^"]+)"',
                  lambda match: f"#include <sluice/{os.path.basename(match[1])}>" if match[1] in public else match[0], text)
    text = re.sub(r"(?<![\w/.-])(?:base|gpu|engine)/[\w/.]*\w",
                  lambda match: f"sluice/{os.path.basename(match[0])}" if match[0] in public else match[0], text)

    def sorted_block(match):
        lines = match[0].splitlines()
        if not any(line.startswith("#include <sluice/") for line in lines):
            return match[0]
        return "\n".join(sorted(lines, key=lambda line: (line.startswith('#include "'), line))) + "\n"
    return re.sub(r'(?:^#include (?:"[^"]+"|<sluice/[^>]+>)\n)+', sorted_block, text, flags=re.MULTILINE)


def rewritten(path, text, paths):
    """The text with old paths replaced: from the root, and in CMake lists from their own folder."""
    def replace(match):
        found = match[0]
        return paths.get(found, found)

    stems = {}
    for old, new in paths.items():
        stems.setdefault(os.path.splitext(old)[0], os.path.splitext(new)[0])
    text = re.sub(r"(?<![\w/.-])(?:base|io|cpu_optim|gpu|engine|tools|tests)/[\w/.]*\w", replace, text)
    text = re.sub(r"(?<=SOURCE_DIR}/)(?:base|io|cpu_optim|gpu|engine|tools|tests)/[\w/.]*\w", replace, text)
    text = re.sub(r"`((?:base|gpu|engine|tools)/[\w/]+)`",
                  lambda match: match[0] if (ROOT / match[1]).is_dir() else f"`{stems.get(match[1], match[1])}`", text)
    if path.endswith("CMakeLists.txt"):
        folder = os.path.dirname(path)

        def local(match):
            new = paths.get(f"{folder}/{match[0]}")
            return os.path.relpath(new, folder) if new and new.startswith(folder + "/") else match[0]
        text = re.sub(r"(?<![\w/])\w+\.(?:cc|cu|html|py)\b", local, text)
        text = re.sub(r"(?<=CURRENT_SOURCE_DIR}/)\w+\.(?:cc|cu|html|py)\b", local, text)
    return text


def with_sorted_includes(old, new):
    """`new` with the blocks of project includes sorted that were sorted in `old`."""
    pattern = re.compile(r'(?:^#include "[^"]+"\n)+', re.MULTILINE)
    olds, news = pattern.findall(old), pattern.findall(new)
    if len(olds) != len(news):
        return new
    blocks = iter([b if a.splitlines() != sorted(a.splitlines()) else "\n".join(sorted(b.splitlines())) + "\n"
                   for a, b in zip(olds, news)])
    return pattern.sub(lambda match: next(blocks), new)


def main():
    paths = moves()
    if "--includes" not in sys.argv[1:]:
        for old, new in sorted(paths.items()) + sorted(public_headers().items()):
            if (ROOT / old).exists():
                (ROOT / new).parent.mkdir(parents=True, exist_ok=True)
                subprocess.run(["git", "mv", old, new], cwd=ROOT, check=True)
    gone = {old: new for old, new in paths.items() if not (ROOT / old).exists()}
    for path in tracked() + tracked("--others", "--exclude-standard"):
        file = ROOT / path
        if file.suffix not in TEXT or path in ("tools/house_move.py", "tests/tidy_test.py") or not file.exists():
            continue
        text = file.read_text(encoding="utf-8")
        new = with_public_includes(with_sorted_includes(text, rewritten(path, text, gone)))
        if new != text:
            file.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
