"""sluice plan: that it agrees with a run, with arithmetic, and what it refuses."""

import json
import os

from cli_support import GPU_RATES, ON_NVME, CliCase, documented_words, mount_tmpfs

SERIAL = {"optimizer.overlap": "serial"}
DEFERRED = {"optimizer.overlap": "deferred"}
BUDGETS = {"memory.device": "1GiB", "memory.host": "1GiB"}


class Plan(CliCase):
    LABEL = "command"

    def plan(self, *arguments, values=None, expect=0):
        self.done = self.run_sluice("plan", self.write_config({**BUDGETS, **(values or {})}),
                                    "--json", "plan.json", *arguments, expect=expect)
        return self.read_json("plan.json")

    def uniform(self, *arguments, values=None, **options):
        return self.plan("--parameters", 2**25, "--layers", 32, *arguments,
                         values={"storage.block_elements": 65536, "batch.micro_batches": 1,
                                 **(values or {})}, **options)

    @staticmethod
    def row(document, name):
        return next(row for row in document["placements"] if row["name"] == name)

    def test_agrees_with_a_run(self):
        values = {**ON_NVME, **SERIAL, "optimizer.lanes": 2}
        run = self.train({**BUDGETS, **values})
        own = self.row(self.plan(values=values), "config")
        self.assertEqual(own["step"]["nvme_read_bytes"], run["predicted_nvme_read_bytes"])
        self.assertEqual(own["step"]["nvme_write_bytes"], run["predicted_nvme_write_bytes"])
        self.assertEqual(own["host_bytes"], run["host_pool_bytes"])
        self.assertEqual(own["device_bytes"], run["device_pool_bytes"])
        for tier in ("device", "host", "nvme"):
            pools = sum(pool["size_bytes"] for pool in own["pools"] if pool["tier"] == tier)
            self.assertEqual(pools, own[tier + "_bytes"])

    def test_a_commit_takes_three_flushes_of_a_busy_drive(self):
        def step_s(*flush):
            values = {**ON_NVME, "optimizer.overlap": "deferred", "storage.state.name": "run"}
            return self.row(self.uniform("--tokens", 1, "--read-rate", "1GB", "--write-rate", "1GB", "--duplex", "half", *flush,
                                         values=values), "config")["step"]["step_s"]
        none, assumed, second, two = (step_s(*flush) for flush in (("--flush-ms", 0), (), ("--flush-ms", 1000), ("--flush-ms", 2000)))
        self.assertAlmostEqual(assumed - none, 3 * 5e-3, places=3)
        self.assertAlmostEqual(two - second, 3, places=1)

    def test_agrees_with_arithmetic(self):
        # 6 operations a parameter and token; 12 bytes written, and read again by the pass.
        document = self.uniform("--tokens", 1000, "--flops", 6e3 * 2**25, "--read-rate", "1GB",
                                "--write-rate", "1GB", "--duplex", "half",
                                values={**ON_NVME, **SERIAL})
        own = self.row(document, "config")
        self.assertAlmostEqual(own["compute_s"], 1, places=6)
        self.assertEqual(own["step"]["nvme_write_bytes"], 12 * 2**25)
        self.assertAlmostEqual(own["step"]["busy_s"]["compute"], 1, places=6)
        storage_s = own["step"]["busy_s"]["storage"]
        moved = own["step"]["nvme_read_bytes"] + own["step"]["nvme_write_bytes"]
        self.assertAlmostEqual(storage_s, moved / 1e9, places=3)
        self.assertGreater(own["step"]["step_s"], 1)
        halved = self.uniform("--tokens", 1000, "--flops", 6e3 * 2**25,
                              values={**ON_NVME, **SERIAL, "batch.micro_batches": 2})
        self.assertAlmostEqual(self.row(halved, "config")["compute_s"], 1, places=6)
        for policy in ("serial", "deferred", "eager", "speculative"):
            self.assertGreaterEqual(own["policies"][policy]["step_s"], own["t_min_s"] * 0.98)
        self.assertLess(own["policies"]["deferred"]["step_s"], own["policies"]["serial"]["step_s"])

    def test_auto_is_what_a_run_comes_to_that_seldom_clips(self):
        host = {"placement.parameters": "host", "placement.optimizer": "host"}
        for values, policy in (({**ON_NVME, "optimizer.clip_norm": 1e9}, "speculative"),
                               ({**host, "optimizer.clip_norm": 1e9}, "deferred"),
                               ({**ON_NVME, "optimizer.clip_norm": 0}, "eager")):
            with self.subTest(policy):
                own = self.row(self.plan(values=values), "config")
                self.assertEqual(own["policy"], policy)
                run = self.train({**BUDGETS, **values, "run.steps": 34})
                self.assertEqual(run["steps"][-1]["policy"], policy)

    def test_tokens_from_which_offload_is_free(self):
        arguments = ("--flops", 1e12, "--read-rate", "1GB", "--write-rate", "1GB")
        values = {**ON_NVME, "optimizer.overlap": "deferred"}
        free = self.uniform("--tokens", 1, *arguments, values=values)["free_from_tokens"]
        for tokens, is_free in ((free * 1.02, True), (free * 0.9, False)):
            own = self.row(self.uniform("--tokens", tokens, *arguments, values=values), "config")
            self.assertEqual(own["step"]["step_s"] <= 1.05 * own["compute_s"], is_free)

    def test_no_tokens_are_free_where_activations_leave_the_device(self):
        # Their bytes grow as computation does.
        values = {**ON_NVME, "optimizer.overlap": "deferred"}
        for home, leaves in (("nvme", True), ("host", True), ("recompute", False)):
            document = self.uniform("--tokens", 4096, values={**values, "activations": home,
                                                                 "memory.device": "64MiB" if leaves else "200MiB"})
            self.assertEqual(self.row(document, "config")["step"]["activation_out_bytes"] != 0, leaves)
            self.assertEqual(document["free_from_tokens"] is None, leaves)
            self.assertEqual("computation hides everything else" in self.done.stdout, not leaves)

    def test_tokens_of_a_model_with_many_blocks(self):
        values = {**ON_NVME, "optimizer.overlap": "deferred", "storage.block_elements": 4096}
        arguments = ("--parameters", 2**26, "--layers", 32, "--flops", 1e12, "--read-rate", "1GB", "--write-rate", "1GB")
        free = self.plan("--tokens", 1, *arguments, values=values)["free_from_tokens"]  # of 16,384 blocks
        for tokens, is_free in ((free * 1.02, True), (free * 0.9, False)):
            own = self.row(self.plan("--tokens", tokens, *arguments, values=values), "config")
            self.assertEqual(own["step"]["step_s"] <= 1.05 * own["compute_s"], is_free)

    def test_ranks_share_the_state(self):
        one = self.row(self.uniform(values=ON_NVME), "nvme")
        four = self.row(self.uniform("--ranks", 4, values=ON_NVME), "nvme")
        self.assertEqual(4 * four["nvme_bytes"], one["nvme_bytes"])
        self.assertAlmostEqual(four["compute_s"], one["compute_s"])
        self.assertIn("collectives take no time", self.done.stdout)

    def test_alternatives_and_budgets(self):
        document = self.uniform(values={"memory.host": "200MiB", **ON_NVME})
        self.assertEqual([row["name"] for row in document["placements"]],
                         ["config", "gpu", "device", "host", "nvme", "mixed"])
        host = self.row(document, "host")
        self.assertFalse(host["fits"])
        self.assertIn("memory.host", host["obstacle"])
        mixed, nvme = self.row(document, "mixed"), self.row(document, "nvme")
        self.assertLess(mixed["step"]["step_s"], nvme["step"]["step_s"])
        self.assertLessEqual(mixed["host_bytes"], 200 << 20)
        self.assertIsNone(document["steps_of_drive_life"])
        keys = set(document).union(*document["placements"])
        keys |= set(nvme["step"]) | set(nvme["pools"][0])
        self.assertEqual(keys - documented_words(), set())

    def test_state_on_the_device(self):
        # Twelve bytes per parameter and their gradients, as far as the budget goes, and only on a GPU.
        budget = {"memory.host": "1GiB", "memory.device": "400MiB", "run.device": "cuda"}
        whole = self.row(self.uniform(values={**budget, "memory.device": "1GiB"}), "config")
        pools = {(pool["tier"], pool["pool"]): pool["size_bytes"] for pool in whole["pools"]}
        self.assertEqual(pools["device", "optimizer state"], 10 * 2**25)
        self.assertEqual(pools["host", "optimizer state"] + pools["host", "gradient set"], 0)
        self.assertEqual(whole["step"]["busy_s"]["optimizer"], 0)
        part = self.row(self.uniform(values=budget), "config")
        pools = {(pool["tier"], pool["pool"]): pool["size_bytes"] for pool in part["pools"]}
        self.assertGreater(pools["device", "optimizer state"], 0)
        self.assertGreater(pools["host", "optimizer state"], 0)
        self.assertLessEqual(part["device_bytes"], 400 << 20)
        host = self.row(self.uniform(values={**budget, "run.device": "host"}), "config")
        pools = {(pool["tier"], pool["pool"]): pool["size_bytes"] for pool in host["pools"]}
        self.assertEqual(pools["device", "optimizer state"], 0)
        self.assertLess(part["step"]["step_s"], host["step"]["step_s"])

    def test_activations_are_listed_for_the_machine_that_computes(self):
        for device, values in (("host", {}), ("cuda", {}), ("host", {"activations": "recompute"}), ("cuda", {"activations": "recompute"})):
            with self.subTest(device=device, **values):
                kept = self.plan(values={"run.device": device, "memory.device": "1GiB", **values})["activation_bytes"]
                self.assertGreater(kept, 0)
                self.assertRegex(self.done.stdout, r"- +activations ")
                if device == "cuda":
                    self.assertIn("with them the GPU holds", self.done.stdout)
                    continue
                self.assertEqual(kept, self.train({**BUDGETS, **values})["activation_bytes"])
        uniform = self.uniform("--tokens", 8192, values={"run.device": "cuda"})
        # Blocks of 2^25 / 32 = 12 W^2 parameters: W = 295.6; sixteen bf16 values of it a token and layer.
        self.assertAlmostEqual(uniform["activation_bytes"] / (16 * 8192 * 295.6 * 2 * 32), 1, delta=1e-3)

    def test_rows_that_do_not_fit_say_so_in_a_sentence(self):
        self.uniform("--stages", "--ranks", 2, values={"memory.host": "20MiB", "memory.device": "20MiB"}, expect=(0, 5))
        rows = [line for line in self.done.stdout.splitlines() if "is too small" in line]
        self.assertGreater(len(rows), 3)
        for row in rows:
            if not row.startswith("this config"):
                self.assertRegex(row, r'works is "\d+KiB" \([^)]*\)(, with memory.host = .*)?$')

    def test_says_where_another_row_is_quicker(self):
        # Reading costs nothing, copies to and from the host a lot: the state is better off on storage.
        serial = {**ON_NVME, "optimizer.overlap": "serial"}
        document = self.uniform(values=serial)
        line = next(line for line in self.done.stdout.splitlines() if "less than config, with" in line)
        own = self.row(document, "config")
        least = min([row["step"]["step_s"] for row in document["placements"] if row["fits"]] +
                    [cost["step_s"] for policy, cost in own["policies"].items() if policy != "eager"])
        self.assertTrue(line.startswith(f"{least:.4g} s"), line)
        self.assertNotIn("auto", line)  # this config names its places and its policy
        settings = dict(setting.split("=") for setting in line.split(" with ")[1].split())
        better = self.row(self.uniform(values={**serial, **settings}), "config")
        self.assertAlmostEqual(better["step"]["step_s"], least)

    def test_says_why_auto_is_not_what_is_quicker(self):
        shape = ("plan", "--parameters", "100M", "--layers", 8, "--tokens", 20000, "--gpu", "4090", "--drive", "990pro",
                 "--set", "memory.device=128MiB", "--host-memory")
        # A sixth of the parameters are in memory, too many to speculate by itself.
        line = next(line for line in self.run_sluice(*shape, "580MiB").stdout.splitlines() if "less than config" in line)
        self.assertRegex(line, r"with optimizer\.overlap=speculative; auto speculates where .* nearly all of the state is on storage, and each "
                               r"path has room for the state and its copy, and as much again$")
        # With a durable store, a commit's copies are those of speculation, and other rules decide.
        self.uniform("--tokens", 100000, "--gpu", "h100", values={**ON_NVME, "memory.device": "64MiB", "memory.host": "94MiB",
                                                                  "storage.state.name": "run", "storage.state.commit_every": 2})
        self.assertRegex(self.done.stdout, r"with optimizer\.overlap=speculative; with a durable store, auto speculates on one rank that "
                                           r"commits every update, where .* all of the state is on storage\n")
        # State on a device that updates it in no time, where "auto" keeps it in the host's memory.
        self.uniform("--device-adam-rate", 60e9, values={"run.device": "host"})
        lines = [line for line in self.done.stdout.splitlines() if "less than config" in line and "placement." in line]
        self.assertEqual(len(lines), 1, self.done.stdout)
        self.assertIn("; auto moves the fewest bytes: memory goes to parameters first", lines[0])

    def test_window_of_every_stage_is_in_the_budget(self):
        document = self.uniform("--stages", "--ranks", 4, values={"memory.device": "20MiB", "memory.host": "1GiB"})
        self.assertLessEqual(document["stages"][3]["window_bytes"], 20 << 20)
        self.assertGreater(document["stages"][3]["window_bytes"], 0)

    def test_refuses_what_train_refuses(self):
        for values, ranks in (({"precision.parameters": "fp16"}, 1),
                              ({"run.device": "host", "sharding.reduction": "nccl"}, 2)):
            with self.subTest(values):
                config = self.write_config({**BUDGETS, "run.device": "cuda", **values})
                done = self.run_sluice("plan", config, "--ranks", ranks, expect=(2, 5))
                self.assertIn("run.device", done.stderr)

    def test_a_drive_of_this_machine_without_room(self):
        os.mkdir(self.path("small"))
        mount_tmpfs(self, self.path("small"), "1m")  # the state takes 1.4 MB
        values = {**ON_NVME, "storage.paths": ["small"]}
        done = self.run_sluice("train", self.write_config({**BUDGETS, **values}), expect=5)
        self.assertIn('"small" needs ', done.stderr)
        document = self.plan("--matrix", values=values, expect=5)
        self.assertRegex(self.done.stdout, '^does not fit this machine: the run needs [0-9.]+ MiB on the drive of "small", which has 1.00 MiB free')
        self.assertIn("here, sluice train would refuse this: ", self.done.stdout)
        self.assertEqual([row["name"] for row in document["placements"] if not row["fits"]], ["nvme"])
        self.assertEqual([cell["offload"] for cell in document["matrix"] if not cell["fits"]], ["optimizer to nvme", "all to nvme"])
        # Two paths on one drive have its space in common, and another drive takes its share.
        os.mkdir(self.path("small", "other"))
        self.plan(values={**values, "storage.paths": ["small", "small/other"]}, expect=5)
        shared = {**values, "storage.paths": ["small", "storage"]}
        self.assertEqual(self.plan(values=shared)["obstacle_here"], "")
        self.train({**BUDGETS, **shared, "optimizer.overlap": "deferred"})
        # Another machine's drives, and a store that may be there already.
        for arguments in (("--drive-space", "1GB"), ("--gpu", "4090"), ("--set", "storage.state.name=run")):
            self.assertEqual(self.plan(*arguments, values=values)["obstacle_here"], "")
        self.run_sluice("train", self.write_config({**BUDGETS, **values, "placement.parameters": "host", "placement.optimizer": "host"}))

    def test_drives_that_the_config_does_not_use_may_be_missing(self):
        in_memory = {"placement.parameters": "host", "placement.optimizer": "host", "optimizer.overlap": "deferred"}
        for missing in ({"storage.paths": ["absent"]}, {"storage.calibration": "absent.json"}):
            document = self.plan("--matrix", values={**in_memory, **missing})
            self.assertEqual(document["obstacle_here"], "")
            self.assertTrue(self.row(document, "config")["fits"])
            if "storage.paths" in missing:
                self.assertIn("absent", self.row(document, "nvme")["obstacle"])
                self.assertIn("optimizer to nvme", [cell["offload"] for cell in document["matrix"] if not cell["fits"]])

    def test_does_not_fit(self):
        document = self.uniform(values={"memory.host": "1MiB", **ON_NVME}, expect=5)
        self.assertIn("this config does not fit", self.done.stdout)
        self.assertFalse(self.row(document, "config")["fits"])
        self.assertIsNone(document["free_from_tokens"])

    def test_life_of_the_drive(self):
        document = self.uniform("--bytes-written-rating", "12TB",
                                values={**ON_NVME, **DEFERRED})
        self.assertAlmostEqual(document["steps_of_drive_life"], 12e12 / (12 * 2**25))
        self.assertIn("the drives' 12 TB last for", self.done.stdout)

    def test_commits_are_in_the_writes_and_in_the_life_of_the_drive(self):
        host = {"placement.parameters": "host", "placement.optimizer": "host", "storage.state.name": "run", **DEFERRED}
        for every in (1, 2, 8):
            with self.subTest(every):
                document = self.uniform("--bytes-written-rating", "12TB", values={**host, "storage.state.commit_every": every})
                written = 12 * 2**25 / every
                self.assertAlmostEqual(self.row(document, "config")["step"]["nvme_write_bytes"] / written, 1, delta=0.01)
                self.assertAlmostEqual(document["steps_of_drive_life"] / (12e12 / written), 1, delta=0.01)
                self.assertRegex(self.done.stdout, r"  of the writes, 384 MiB are a commit's, of state at home in memory" +
                                 ("\n" if every == 1 else rf", once in {every} steps\n"))

    def test_gradients_that_wait_on_storage_go_there_for_every_micro_batch(self):
        values = {**ON_NVME, **DEFERRED, "placement.gradients": "nvme"}
        for count in (1, 4):
            own = self.row(self.uniform(values={**values, "batch.micro_batches": count}), "config")
            self.assertEqual(own["step"]["gradient_spill_bytes"], count * 2 * 2**25)
            each = f", {64:.1f} MiB for each of {count} micro-batches" if count > 1 else ""
            self.assertIn(f"{64 * count if count > 1 else 64.0} MiB are gradients that wait on storage (placement.gradients){each}\n",
                          self.done.stdout)

    def test_steps_of_any_length(self):
        # 10^22 operations at one a second: more nanoseconds than 64 bits count.
        for flops in (1, 1e6, 1e24):
            document = self.uniform("--tokens", "50T", "--flops", flops, values={**ON_NVME, **SERIAL})
            own = self.row(document, "config")
            self.assertAlmostEqual(own["compute_s"] / (6 * 50e12 * 2**25 / flops), 1, places=6)
            self.assertGreaterEqual(own["step"]["step_s"], own["compute_s"] * (1 - 1e-6))
            if flops < 1e9:
                self.assertAlmostEqual(own["step"]["step_s"] / own["compute_s"], 1, places=6)

    def test_activations_grow_with_the_tokens(self):
        for values in ({}, {"activations": "recompute"}):
            one = self.plan(values=values)
            two = self.plan("--tokens", 2 * one["tokens"], values=values)
            self.assertAlmostEqual(two["activation_bytes"] / one["activation_bytes"], 2, places=4)
            pools = [{pool["pool"]: pool["size_bytes"] for pool in self.row(plan, "config")["pools"] if pool["tier"] == "device"}
                     for plan in (one, two)]
            window = "activation window"
            self.assertAlmostEqual(pools[1].get(window, 0), 2 * pools[0].get(window, 0), delta=8192)

    def calibrate(self, interference):
        with open(self.path("io.json"), "w", encoding="utf-8") as file:
            json.dump({"best": {"read": {"bytes_per_second": 2e9},
                                "write": {"bytes_per_second": 1e9}},
                       "interference": interference}, file)
        rows = [{"state": state, "threads": threads, "parameters_per_s": {"median": rate}}
                for state, threads, rate in (("split_bf16", 2, 2e8), ("split_bf16", 1, 1e8),
                                             ("fp32", 2, 4e8))]
        with open(self.path("adam.json"), "w", encoding="utf-8") as file:
            json.dump({"results": rows}, file)

    def test_calibration_files(self):
        # Alone, the bytes of a second of both take 1.5 s one after the other, and at least 1 s.
        for interference, duplex, read, write in ((1.0, "half", 2.0, 1.0), (0.9, "half", 2.0 / 0.9, 1.0 / 0.9),
                                                  (2 / 3, "full", 2.0, 1.0), (0.8, "full", 2.0 / 1.2, 1.0 / 1.2),
                                                  (0.5, "full", 2.0, 1.0)):
            with self.subTest(interference):
                self.calibrate(interference)
                own = self.row(self.uniform("--io", "io.json", "--adam", "adam.json",
                                            values={**ON_NVME, **DEFERRED}), "config")
                self.assertRegex(self.done.stdout, rf"reads +{read:.2f} GB/s  calibration")
                self.assertRegex(self.done.stdout,
                                 rf"writes +{write:.2f} GB/s  calibration, {duplex}")
                self.assertRegex(self.done.stdout, r"Adam +0.20 Gparam/s  calibration")
                busy = own["step"]["busy_s"]
                adam = 2**25 / 2e8
                self.assertAlmostEqual(busy["optimizer"], adam * (1 + 2 / 26), places=5)
        self.uniform("--adam", "adam.json", "--adam-rate", 3e8, values=ON_NVME)
        self.assertRegex(self.done.stdout, r"Adam +0.30 Gparam/s  stated")
        self.uniform("--adam", "adam.json", values={**ON_NVME, "precision.parameters": "fp32"})
        self.assertRegex(self.done.stdout, r"Adam +0.40 Gparam/s")

    def test_a_rate_that_is_none_is_refused_with_its_field(self):
        for name, option, field, change in (
                ("io.json", "--io", "best.read.bytes_per_second is 0", lambda it: it["best"]["read"].update(bytes_per_second=0)),
                ("io.json", "--io", "best.write.bytes_per_second is -5", lambda it: it["best"]["write"].update(bytes_per_second=-5)),
                ("io.json", "--io", "interference is 0", lambda it: it.update(interference=0)),
                ("adam.json", "--adam", "parameters_per_s.median of", lambda it: [row["parameters_per_s"].update(median=0)
                                                                                  for row in it["results"]])):
            with self.subTest(field):
                self.calibrate(1.0)
                document = self.read_json(name)
                change(document)
                with open(self.path(name), "w", encoding="utf-8") as file:
                    json.dump(document, file)
                done = self.run_sluice("plan", self.write_config(ON_NVME), option, name, expect=2)
                self.assertIn(f'"{name}": {field}', done.stderr)
                self.assertIn("must be more than 0", done.stderr)

    def test_figures_of_bench_gpu(self):
        def rates(document, *arguments, values=None):
            with open(self.path("gpu.json"), "w", encoding="utf-8") as file:
                json.dump(document, file)
            self.plan_of = self.row(self.uniform("--tokens", 4096, "--gpu-rates", "gpu.json", *arguments,
                                                 values={"run.device": "cuda", **(values or {})}), "config")
            return {line[2:17].strip(): line[17:].strip() for line in self.done.stdout.splitlines()[2:8]}
        host = {"placement.parameters": "host", "placement.optimizer": "host", "run.device": "cuda", "optimizer.overlap": "serial"}
        shown = rates(GPU_RATES, values=host)
        self.assertEqual(shown, {"storage reads": "3.00 GB/s  measured by bench gpu",
                                 "storage writes": "2.00 GB/s  measured by bench gpu, half duplex",
                                 "copies": "10.00 GB/s  measured by bench gpu, and back 5.00 GB/s",
                                 "Adam": "1.50 Gparam/s  measured by bench gpu", "on the device": "50.00 Gparam/s  measured by bench gpu",
                                 "computation": "90.0 Tflop/s  measured by bench gpu"})
        busy = self.plan_of["step"]["busy_s"]
        self.assertAlmostEqual(busy["copies from the device"], 2 * 2**25 / 5e9, places=6)
        self.assertAlmostEqual(busy["compute"] / (6 * 4096 * 2**25 / 90e12), 1, places=5)
        self.assertAlmostEqual(busy["optimizer"], 2**25 / 1.5e9 * (1 + 2 / 26), places=5)
        # Host memory takes time where a bench has measured it, or an option says its rate. Parameters, momenta and
        # gradients in 26 bytes are read and written; the copies both ways move four more.
        def memory_of(document, *arguments):
            rates(document, *arguments, values=host)
            line = next((line for line in self.done.stdout.splitlines() if line.startswith("  host memory ")), "")
            return " ".join(line.split()), self.plan_of["step"]["busy_s"].get("host memory", 0)
        self.assertEqual(memory_of(GPU_RATES), ("", 0))
        measured = {**GPU_RATES, "host_memory": {"gb_per_s": {"median": 0.5, "least": 0.4, "most": 0.6}}}
        line, busy_s = memory_of(measured)
        self.assertEqual(line, "host memory 0.50 GB/s measured by bench gpu")
        moved = 26 * 2**25 + 5e9 * busy["copies from the device"] + 10e9 * self.plan_of["step"]["busy_s"]["copies to the device"]
        self.assertAlmostEqual(busy_s, moved / 0.5e9, places=5)
        self.assertAlmostEqual(self.plan_of["step"]["step_s"], busy_s, places=9)
        self.assertIn("host memory binds", self.done.stdout)
        self.assertEqual(memory_of(measured, "--host-memory-rate", "250MB"), ("host memory 0.25 GB/s stated", 2 * busy_s))
        # The copies of one GPU say nothing about memory that several share; a stated rate is the host's.
        several = ("--ranks", 2, "--nodes", 1)
        self.assertEqual(memory_of(measured, *several), ("", 0))
        self.assertEqual(memory_of(measured, *several, "--host-memory-rate", "1GB")[0], "host memory 0.50 GB/s stated")
        # Stated rates and calibrations come first; a data sheet is more than the bench's drive, and less than its computation.
        self.calibrate(0.5)
        shown = rates(GPU_RATES, "--io", "io.json", "--adam", "adam.json", "--copy-rate", "7GB", "--flops", 1e13)
        self.assertEqual([shown[name] for name in ("storage reads", "copies", "Adam", "computation")],
                         ["2.00 GB/s  calibration", "7.00 GB/s  stated, each way", "0.20 Gparam/s  calibration", "10.0 Tflop/s  stated"])
        shown = rates(GPU_RATES, "--gpu", "4090", "--drive", "990pro")
        self.assertEqual((shown["storage reads"], shown["computation"]),
                         ("7.45 GB/s  data sheet of 990pro", "90.0 Tflop/s  measured by bench gpu"))
        # A bench that was stopped has the copies and the kernel; fp32 parameters were not updated in it.
        begun = {key: GPU_RATES[key] for key in ("gpu", "copies", "adam")}
        self.assertEqual([rates(begun)[name] for name in ("Adam", "computation", "storage reads")],
                         ["2.00 Gparam/s  assumed", "200.0 Tflop/s  assumed", "6.00 GB/s  assumed"])
        self.assertEqual(rates(GPU_RATES, values={"precision.parameters": "fp32"})["Adam"], "2.00 Gparam/s  assumed")
        for broken in ({**GPU_RATES, "copies": GPU_RATES["copies"][:1]}, {**GPU_RATES, "adam": {}}, {**GPU_RATES, "drive": {}},
                       {**GPU_RATES, "adam": {"parameters_per_s": 0}}, {**GPU_RATES, "copies": 5}, {**GPU_RATES, "host_memory": {}},
                       {**GPU_RATES, "host_memory": {"gb_per_s": {"median": -1}}}):
            with open(self.path("gpu.json"), "w", encoding="utf-8") as file:
                json.dump(broken, file)
            done = self.run_sluice("plan", self.write_config({"run.device": "cuda"}), "--gpu-rates", "gpu.json", expect=2)
            self.assertIn('"gpu.json" has no rates of copies both ways and of the optimizer on the device, or one that is no rate; write it with '
                          "sluice bench gpu --json", done.stderr)

    def test_the_device_updates_at_its_rate(self):
        # One thread of the host updates there, however many there are here, in the config or beside other ranks.
        self.calibrate(0.5)
        for rate, source, options in ((0.25, "assumed", ()), (0.25, "assumed", ("--ranks", 4)), (0.25, "assumed", ("--ranks", 4, "--nodes", 2)),
                                      (0.10, "calibration", ("--adam", "adam.json")), (0.01, "assumed", ("--adam-rate", 1e7))):
            for threads in (1, 2, 16):
                with self.subTest(options=options, threads=threads):
                    host = self.row(self.uniform(*options, values={"run.device": "host", "run.threads": threads}), "gpu")
                    self.assertRegex(self.done.stdout, rf"on the device +{rate:.2f} Gparam/s  {source}, a thread of the host\n")
                    self.assertAlmostEqual(host["step"]["busy_s"]["optimizer on the device"] * (4 if "--ranks" in options else 1) /
                                           (2**25 / (rate * 1e9)), 1, places=5)
        with open(self.path("gpu.json"), "w", encoding="utf-8") as file:
            json.dump(GPU_RATES, file)
        refused = self.run_sluice("plan", self.write_config({"run.device": "host"}), "--gpu-rates", "gpu.json", expect=2)
        self.assertIn('--gpu-rates "gpu.json" has the rates of a GPU, but this plan computes on the host; set run.device to "cuda", or give --gpu',
                      refused.stderr)
        for rate, option in ((60e9, ()), (1e9, ("--device-adam-rate", 1e9))):
            gpu = self.row(self.uniform(*option, values={"run.device": "cuda"}), "gpu")
            self.assertAlmostEqual(gpu["step"]["busy_s"]["optimizer on the device"], 2**25 / rate, places=6)
            self.assertEqual(gpu["step"]["busy_s"]["optimizer"], 0)
            self.assertRegex(self.done.stdout, rf"on the device +{rate * 1e-9:.2f} Gparam/s  {'stated' if option else 'assumed'}")
        half = self.row(self.uniform("--ranks", 2, "--device-adam-rate", 1e9, values={"sharding.stage": 3}), "gpu")
        self.assertAlmostEqual(half["step"]["busy_s"]["optimizer on the device"], 2**24 / 1e9, places=6)

    def test_refusals(self):
        self.calibrate(None)
        for arguments, words in ((("--io", "none.json"), "none.json"),
                                 (("--io", "io.json"), "sluice bench io --json"),
                                 (("--adam", "io.json"), "sluice bench adam --state fp32 --json"),
                                 (("--io", "text.txt"), "no JSON"),
                                 (("--read-rate", "1KB"), "--read-rate"),
                                 (("--adam-rate", -1), "--adam-rate"),
                                 (("--device-adam-rate", 0), "--device-adam-rate"),
                                 (("--flops", 0), "--flops"),
                                 (("--tokens", 0), "--tokens"),
                                 (("--parameters", 5, "--layers", 6), "6 layers"),
                                 (("--duplex", "both"), "both")):
            with self.subTest(arguments):
                done = self.run_sluice("plan", self.write_config(), *arguments, expect=2)
                self.assertIn(words, done.stderr + done.stdout)
