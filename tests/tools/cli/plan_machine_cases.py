"""sluice plan for machines that are not at hand: hosts, drives, links, and systems of which others have published runs."""

import json
import os
import re

from cli_support import ON_NVME, CliCase
from ranks_support import RanksTest

# Models that others trained, with their machines. The batch and the sequence are those of the source; activations are recomputed from what
# layers hand on, which waits on storage. Units are parts of a layer (such as attention, and the two products of the MLP), as an
# application makes them where a layer is too large for the device.
PUBLISHED = {
    # Rajbhandari et al., ZeRO-Infinity, arXiv:2104.07857, sections 8.1 and 8.2: DGX-2 nodes of 16 V100 with 32 GB, 1.5 TB of
    # memory and 28 TB of NVMe.
    "1e12 on a DGX-2": (1e12, 384, 7168, "v100", ["--ranks", 16, "--nodes", 1, "--host-memory", "1.5T", "--drive-space", "28TB"],
                        {"precision.parameters": "fp16", "activations": "nvme"}),
    "32e12 on 32 DGX-2": (32e12, 6144, 1024, "v100",
                          ["--ranks", 512, "--nodes", 32, "--host-memory", "1.5T", "--drive-space", "28TB"],
                          {"precision.parameters": "fp16", "activations": "nvme"}),
    # Liao et al., LoHan, arXiv:2403.06504, section V: an RTX 4090, 256 GB of memory (and less), 12 drives of 3.84 TB.
    "13e9 on a 4090 (LoHan)": (13e9, 40, 32 * 1024, "4090", ["--host-memory", "128G", "--drive", "pm9a3:12"], {"activations": "host"}),
    # Schultheis and Alistarh, LLMQ, arXiv:2512.15306: an RTX 4090, with the state in host memory.
    "14e9 on a 4090 (LLMQ)": (14e9, 48, 16 * 1024, "4090", ["--host-memory", "256G"],
                              {"activations": "recompute", "placement.parameters": "host", "placement.optimizer": "host"}),
}
# Half of the memory and drives, and the pool that then fails. LoHan's 13e9 fit half of both, too, and are far from the limit of that
# machine: its authors train 175e9 on it. An eighth of the memory does not hold the activations between layers.
HALF = {"1e12 on a DGX-2": (["--ranks", 16, "--nodes", 1, "--host-memory", "750G", "--drive-space", "14TB"], "storage needs"),
        "32e12 on 32 DGX-2": (["--ranks", 512, "--nodes", 32, "--host-memory", "750G", "--drive-space", "14TB"], "storage needs"),
        "13e9 on a 4090 (LoHan)": (["--host-memory", "64G", "--drive", "pm9a3:6"], None),
        "14e9 on a 4090 (LLMQ)": (["--host-memory", "128G"], "memory.host = 128 GiB is too small")}
EIGHTH = ["--host-memory", "16G", "--drive", "pm9a3:6"]


class Machine(CliCase):
    LABEL = "command"

    def plan(self, *arguments, values=None, expect=0):
        sets = [word for key, value in (values or {}).items() for word in ("--set", f"{key}={value}")]
        self.done = self.run_sluice("plan", *arguments, *sets, "--json", "plan.json", expect=expect)
        return self.read_json("plan.json")

    def own(self, *arguments, **options):
        return self.plan(*arguments, **options)["placements"][0]

    def published(self, name, scale=1, machine=None, expect=0):
        parameters, layers, tokens, gpu, own, values = PUBLISHED[name]
        return self.own("--parameters", parameters * scale, "--layers", layers, "--tokens", tokens, "--gpu", gpu,
                        *(machine or own), values=values, expect=expect)

    def test_published_runs_fit_their_machines(self):
        for name in PUBLISHED:
            with self.subTest(name):
                self.assertTrue(self.published(name)["fits"])

    def test_ten_times_the_parameters_do_not(self):
        for name in PUBLISHED:
            with self.subTest(name):
                self.assertIn("memory.device = ", self.published(name, scale=10, expect=5)["obstacle"])
                self.assertRegex(self.done.stdout.splitlines()[0], r"^does not fit: memory\.device = .* is too small; the smallest that works")

    def test_a_budget_beyond_the_gpu_does_not_fit(self):
        wanted = ("--model", "llama-2-7b", "--gpu", "4090", "--host-memory", "64G", "--tokens", "2048")
        refused = self.run_sluice("plan", *wanted, "--set", "memory.device=24GiB", expect=5).stderr
        self.assertIn("does not fit: memory.device is 24.0 GiB, the activations of 2048 tokens take ", refused)
        most = float(re.search(r"set memory.device to at most ([0-9.]+) GiB", refused)[1])
        self.assertTrue(self.own(*wanted, values={"memory.device": f"{int(1024 * (most - 0.1))}MiB"})["fits"])
        self.run_sluice("plan", *wanted, "--set", f"memory.device={int(1024 * (most + 0.1))}MiB", expect=5)

    def test_a_budget_that_a_gpu_leaves_is_named_with_its_reason(self):
        wanted = ("--model", "llama-2-7b", "--gpu", "4090", "--host-memory", "64G")
        refused = self.run_sluice("plan", *wanted, "--tokens", "1000000", expect=5).stderr
        most = int(re.search(r"give --tokens ([0-9]+) or fewer, or --set activations=recompute", refused)[1])
        self.assertTrue(self.own(*wanted, "--tokens", most)["fits"])
        obstacle = self.own(*wanted, "--tokens", most + 9, expect=5)["obstacle"]
        self.assertIn("memory.device = ", obstacle)
        self.assertIn(f"what a 4090 leaves beside the driver and the activations of {most + 9} tokens: give --tokens {most} or fewer, "
                      "or a larger --gpu", obstacle)

        self.assertIn(f"memory.device is what a 4090 leaves beside the driver and the activations of {most + 9} tokens",
                      self.done.stdout.splitlines()[0])
        self.assertLess(obstacle.index("give --tokens"), obstacle.index(":\n"))  # before the list of pools
        for row in self.plan(*wanted, "--tokens", 1)["placements"][1:]:  # nothing fits beside these, or all does
            self.assertNotIn("give fewer --tokens", row.get("obstacle", ""))

    def test_the_tokens_that_fit_beside_recomputed_activations(self):
        wanted = ("--model", "llama-2-7b", "--gpu", "4090", "--host-memory", "64G", "--set", "activations=recompute", "--tokens")
        found = set()
        for tokens in (60000, 1000000):  # too many for the pools, and for the GPU without pools
            done = self.run_sluice("plan", *wanted, tokens, expect=5)
            found.add(re.search(r"give --tokens ([0-9]+) or fewer", done.stdout + done.stderr)[1])
        self.assertEqual(len(found), 1, found)
        most = int(found.pop())
        self.run_sluice("plan", *wanted, most)
        self.run_sluice("plan", *wanted, most + 1, expect=5)

    def test_half_of_the_machine(self):
        self.assertEqual(set(HALF), set(PUBLISHED))
        for name, (machine, pool) in HALF.items():
            with self.subTest(name):
                own = self.published(name, machine=machine, expect=5 if pool else 0)
                self.assertEqual(own["fits"], pool is None)
                self.assertIn(pool or "", own.get("obstacle", ""))

    def test_what_lohans_run_needs_at_least(self):
        name = "13e9 on a 4090 (LoHan)"
        obstacle = self.published(name, machine=EIGHTH, expect=5)["obstacle"]
        least = re.match(r'memory\.host = 16\.0 GiB is too small; the smallest that works is "(\d+)KiB"', obstacle)
        self.assertTrue(least, obstacle)
        boundaries = 39 * 32 * 1024 * 5204 * 4  # tokens of width W in fp32, where a layer has 12 W^2 parameters
        self.assertAlmostEqual(1024 * int(least[1]) / boundaries, 1, delta=0.01)
        self.assertTrue(self.published(name, machine=["--host-memory", f"{least[1]}KiB", "--drive", "pm9a3:6"])["fits"])
        self.assertIn("storage needs", self.published(name, machine=["--host-memory", "64G", "--drive-space", "100GB"], expect=5)["obstacle"])

    def test_storage_that_is_too_small_is_named(self):
        drives = PUBLISHED["1e12 on a DGX-2"][4]
        half = [*drives[:-1], "14TB"]
        obstacle = self.published("1e12 on a DGX-2", machine=half, expect=5)["obstacle"]
        self.assertRegex(obstacle, r"storage needs \d+ GiB for each rank, but this rank's share of the drives, which 16 ranks have in "
                                   r"common, is 815 GiB; take more or larger drives")
        self.assertIn("does not fit: storage needs", self.done.stdout)

    def test_the_drives_of_another_machine_are_those_of_the_options(self):
        wanted = ("--parameters", "1e9", "--layers", 24, "--tokens", 4096, "--gpu", "4090", "--host-memory", "8G")
        values = {**ON_NVME, "activations": "recompute", "storage.paths": '["/none"]'}
        planned = self.plan(*wanted, values=values)  # no path of this machine
        self.assertEqual(planned["placements"][0]["policy"], "speculative")
        self.assertEqual(planned, self.plan(*wanted, "--drive-space", "1000TB", values=values))

    def test_a_policy_without_room_for_its_copy_is_not_proposed(self):
        wanted = ("--parameters", "100M", "--layers", 8, "--tokens", 20000, "--gpu", "4090", "--host-memory", "580MiB", "--drive-space")
        values = {"memory.device": "128MiB"}
        own = self.own(*wanted, "3GB", values=values)
        self.assertIn("speculative", own["policies"])
        self.assertIn("less than config, with optimizer.overlap=speculative", self.done.stdout)
        self.own(*wanted, "1500MB", values={**values, "optimizer.overlap": "speculative"}, expect=5)
        own = self.own(*wanted, "1500MB", values=values)
        self.assertEqual(sorted(own["policies"]), ["deferred", "eager", "serial"])
        self.assertNotIn("overlap=speculative", self.done.stdout)

    def test_a_host_is_shared_by_its_ranks(self):
        shape = ["--parameters", 2**28, "--layers", 32, "--ranks", 8, "--gpu", "h100"]
        whole = self.own(*shape, "--host-memory", "2GiB", "--read-rate", "1GB", "--write-rate", "1GB", "--adam-rate", 1e9, values=ON_NVME)
        share = self.own(*shape, "--nodes", 2, "--host-memory", "8GiB", "--read-rate", "4GB", "--write-rate", "4GB", "--adam-rate", 4e9,
                         values=ON_NVME)
        self.assertEqual(share, whole)
        self.assertIn("each of 4 ranks has this share", self.done.stdout)

    def test_drives_by_name(self):
        shape = ["--parameters", 2**28, "--layers", 32, "--gpu", "h100", "--host-memory", "2GiB"]
        named = self.plan(*shape, "--drive", "990pro:2", values=ON_NVME)
        self.assertIn("14.90 GB/s  data sheet of 990pro:2", self.done.stdout)
        self.assertIn("the drives' 2400 TB last for", self.done.stdout)
        stated = self.plan(*shape, "--read-rate", "14900MB", "--write-rate", "13800MB", "--bytes-written-rating", "2400TB", values=ON_NVME)
        self.assertEqual(named, stated)
        for wrong in ("990pro:0", "990pro:", "990pro:x", "990pro:1025"):
            self.assertIn("from 1 to 1024", self.run_sluice("plan", *shape, "--drive", wrong, expect=2).stderr)
        shared = self.plan(*shape, "--ranks", 4, "--nodes", 2, "--drive", "990pro:2", values=ON_NVME)
        self.assertIn("the drives' 2400 TB last for", self.done.stdout)
        life = 2 * named["steps_of_drive_life"]  # half of the bytes are each node's
        self.assertAlmostEqual(shared["steps_of_drive_life"], life, delta=0.02 * life)
        tight = self.plan(*shape, "--drive", "990pro:2", "--drive-space", "1GB", values=ON_NVME, expect=5)
        self.assertIn("but the drives have 954 MiB", tight["placements"][0]["obstacle"])
        self.assertIsNone(tight["steps_of_drive_life"])
        self.assertIn("990pro, sn850x", self.run_sluice("plan", *shape, "--drive", "floppy", expect=2).stderr)

    def test_a_plan_is_saved_as_a_config(self):
        wanted = ("--parameters", "1e9", "--layers", 24, "--tokens", 4096, "--gpu", "4090", "--host-memory", "8G",
                  "--set", "activations=recompute", "--set", "optimizer.clip_norm=0.5")
        own = self.own(*wanted, "--output", "saved.json")
        self.assertIn("saved.json is written", self.done.stdout)
        saved = self.read_json("saved.json")
        self.assertEqual((saved["activations"], saved["optimizer"]["clip_norm"], saved["memory"]["host"]), ("recompute", 0.5, str(8 << 30)))
        self.run_sluice("config", "check", "saved.json")
        # The budgets of another machine are in the file, which needs neither option.
        again = self.own("saved.json", "--parameters", "1e9", "--layers", 24, "--tokens", 4096, "--gpu", "4090")
        self.assertEqual((again["device_bytes"], again["host_bytes"], again["pools"]), (own["device_bytes"], own["host_bytes"], own["pools"]))
        self.plan("--parameters", "1e9", "--layers", 24, "--gpu", "4090", "--set", "activations=recompute", "--set", "memory.host=2MiB",
                  "--output", "none.json", expect=5)
        self.assertIn("the plan does not fit, so there is no config to write", self.done.stderr)
        self.assertFalse(os.path.exists(self.path("none.json")))

    def test_updates_on_the_gpu_cost_its_link(self):
        sizes = ("--parameters", "1e9", "--layers", 24, "--tokens", 4096, "--gpu", "4090", "--host-memory", "64G", "--copy-rate", "20GB",
                 "--flops", "1e15", "--set", "memory.device=4GiB", "--set", "activations=recompute", "--set", "placement.parameters=device", "--set", "placement.optimizer=host")
        # A slow processor: 1e9 parameters take 5 s there, and 12e9 bytes of record and gradient 0.6 s on the link.
        on_cpu = self.own(*sizes, "--adam-rate", 2e8)
        self.assertLess(on_cpu["on_other_processor"]["step_s"], on_cpu["step"]["step_s"] / 3)
        self.assertRegex(self.done.stdout, r"with optimizer\.update_on device: [\d.]+ s \(")
        self.assertRegex(self.done.stdout, r"less than config, with optimizer\.update_on=device")
        on_device = self.own(*sizes, "--adam-rate", 2e8, "--set", "optimizer.update_on=device")
        self.assertAlmostEqual(on_device["step"]["step_s"], on_cpu["on_other_processor"]["step_s"])
        self.assertAlmostEqual(on_device["step"]["busy_s"]["copies to the device"], 12e9 / 20e9, delta=0.02)
        self.assertAlmostEqual(on_device["on_other_processor"]["step_s"], on_cpu["step"]["step_s"])
        # The sums of the norm come before the updates, unless nothing is clipped.
        self.assertIn(f"{on_device['policies']['eager']['step_s']:.4g} s, ", self.done.stdout)
        self.assertIn("less than config, without clipping (optimizer.clip_norm 0), which changes results", self.done.stdout)
        self.own(*sizes, "--adam-rate", 2e8, "--set", "optimizer.update_on=device", "--set", "optimizer.clip_norm=0")
        self.assertNotIn("without clipping", self.done.stdout)
        # Steps that are skipped keep updates from beginning in backward, too.
        for key in ("optimizer.non_finite=skip", "precision.loss_scale.static=0"):
            self.own(*sizes, "--adam-rate", 2e8, "--set", "optimizer.update_on=device", "--set", key)
            self.assertNotIn("without clipping", self.done.stdout)
        # A quick one: nothing to win.
        self.assertNotIn("update_on=device", (self.own(*sizes, "--adam-rate", 1e11), self.done.stdout)[1])

    def test_a_calibration_takes_precedence_over_a_data_sheet(self):
        with open(self.path("io.json"), "w", encoding="utf-8") as file:
            json.dump({"best": {"read": {"bytes_per_second": 2e9}, "write": {"bytes_per_second": 1e9}}, "interference": 0.5}, file)
        self.plan("--parameters", 2**28, "--layers", 32, "--drive", "990pro", "--io", "io.json")
        self.assertRegex(self.done.stdout, r"reads +2\.00 GB/s  calibration\n")
        self.assertRegex(self.done.stdout, r"writes +1\.00 GB/s  calibration, full duplex\n")
        self.plan("--parameters", 2**28, "--layers", 32, "--drive", "990pro", "--io", "io.json", "--read-rate", "3GB")
        self.assertRegex(self.done.stdout, r"reads +3\.00 GB/s  stated\n")

    def test_a_group_that_is_a_node(self):
        shape = ["--parameters", 2**28, "--layers", 32, "--gpu", "h100", "--ranks", 8, "--host-memory", "8GiB"]
        named, number = (self.own(*shape, "--nodes", 2, values={"sharding.group": group}) for group in ("node", 4))
        self.assertEqual(named, number)
        self.assertNotEqual(named, self.own(*shape, "--nodes", 2))
        done = self.run_sluice("plan", *shape, "--set", "sharding.group=node", expect=2)
        self.assertIn("say with --nodes how many nodes there are", done.stderr)

    def test_links_take_at_least_their_time(self):
        shape = ["--parameters", 2**28, "--layers", 32, "--gpu", "h100", "--ranks", 4, "--host-memory", "8GiB", "--tokens", 1]
        free = self.own(*shape)
        self.assertIn("collectives take no time in this plan (--link-rate): a rank gathers", self.done.stdout)
        slow = self.own(*shape, "--link-rate", "1MB")
        moved = slow["collectives"]["gathered_bytes"] + slow["collectives"]["reduced_bytes"]
        self.assertAlmostEqual(slow["step"]["busy_s"]["links between ranks"], 0.75 * moved / 1e6)
        self.assertEqual(slow["step"]["step_s"], slow["step"]["busy_s"]["links between ranks"])
        self.assertEqual(slow["step"]["binds"], "links between ranks")
        quick = self.own(*shape, "--link-rate", "100TB")
        self.assertEqual(quick["step"]["step_s"], free["step"]["step_s"])


class Collectives(RanksTest):
    """The bytes that a plan states are those that a run counts."""

    def agree(self, ranks, values):
        # Other policies gather some units' parameters in the step after their update.
        values = {"run.threads": 1, "run.steps": 3, "memory.device": "64MiB", "memory.host": "64MiB", "optimizer.overlap": "serial",
                  "sharding.keep_gathered": "0", **values}
        run = self.train_ranks(ranks, values)["steps"][-1]
        self.run_sluice("plan", self.write_config(values), "--ranks", ranks, "--json", "plan.json")
        planned = self.read_json("plan.json")["placements"][0]["collectives"]
        self.assertEqual((planned["gathered_bytes"], planned["reduced_bytes"]), (run["gathered_bytes"], run["reduced_bytes"]))
        self.assertGreater(planned["reduced_bytes"], 0)
        self.assertGreater(planned["gathered_bytes"], 0)

    def test_stages(self):
        for stage in (0, 1, 2, 3):
            for micro_batches in (1, 3):
                with self.subTest(f"stage {stage}, {micro_batches} micro-batches"):
                    self.agree(2, {"sharding.stage": stage, "batch.micro_batches": micro_batches})

    def test_parameters_of_stage_3(self):
        for values in ({"sharding.keep_gathered": "100KB"}, {"memory.device": "2MiB", **ON_NVME},
                       {"batch.micro_batches": 2, "batch.order": "vertical", "activations": "recompute"}):
            with self.subTest(str(values)):
                self.agree(2, {"sharding.stage": 3, **values})

    def test_groups(self):
        self.agree(4, {"sharding.group": 2})
