"""sluice train on two hosts: network namespaces with host names of their own and a cable between them. Needs root."""

import os
import shutil
import subprocess

from cli_support import ON_NVME
from ranks_support import RanksTest

AGENT = """#!/bin/sh
# mpirun's way to the other host: HOST COMMAND...
shift
exec ip netns exec {there} unshare --uts sh -c "hostname {there}; exec sh -c '$*'"
"""


class HostsCase(RanksTest):
    def setUp(self):
        super().setUp()
        if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
            self.skipTest("two hosts need root, ip and unshare")
        name = f"sl{os.getpid()}"
        self.here, self.there, self.link = f"{name}a", f"{name}b", f"{name}v"
        try:
            self.ip("netns", "add", self.here)
            self.addCleanup(self.ip, "netns", "del", self.here)
            self.ip("netns", "add", self.there)
            self.addCleanup(self.ip, "netns", "del", self.there)
            self.ip("link", "add", self.link, "netns", self.here, "type", "veth", "peer", "name", self.link, "netns", self.there)
        except subprocess.CalledProcessError as error:
            self.skipTest(f"no network namespaces: {error.stderr.strip()}")
        for host, address in ((self.here, "10.77.0.1/24"), (self.there, "10.77.0.2/24")):
            self.ip("-n", host, "addr", "add", address, "dev", self.link)
            self.ip("-n", host, "link", "set", "lo", "up")
            self.ip("-n", host, "link", "set", self.link, "up")
        with open(self.path("agent.sh"), "w", encoding="utf-8") as file:
            file.write(AGENT.format(there=self.there))
        os.chmod(self.path("agent.sh"), 0o755)

    def ip(self, *arguments):
        return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True, timeout=10).stdout

    def sent_bytes(self):
        return int(self.ip("netns", "exec", self.here, "cat", f"/sys/class/net/{self.link}/statistics/tx_bytes"))

    def mpirun_on_hosts(self, ranks):
        mpirun = (f"hostname {self.here}; exec mpirun --mca plm_rsh_agent {self.path('agent.sh')}"
                  " --mca btl self,vader,tcp --mca btl_tcp_if_include 10.77.0.0/24 --mca oob_tcp_if_include 10.77.0.0/24"
                  f' --host 10.77.0.1:{ranks // 2},10.77.0.2:{ranks // 2} -n {ranks} "$@"')
        return ("timeout", "-k", "5", "100", "ip", "netns", "exec", self.here, "unshare", "--uts", "sh", "-c", mpirun, "sh")

    def train_on_hosts(self, ranks, values, *options):
        config = self.write_config({"run.threads": 1, "sharding.keep_gathered": "0", **values})
        before = self.sent_bytes()
        self.run_sluice("train", self.path(config), "--quiet", "--json", self.path("hosts.json"),
                        "--data", self.path("text.txt"), "--set", f'storage.paths=["{self.path("storage")}"]', *options,
                        prefix=self.mpirun_on_hosts(ranks))
        return self.read_json("hosts.json"), self.sent_bytes() - before

    def test_two_hosts_give_the_bits_of_one(self):
        for stage, placement in ((0, {}), (3, ON_NVME)):
            values = {"sharding.stage": stage, **placement}
            hosts, sent = self.train_on_hosts(4, values)
            self.assertEqual(hosts["state_sha256"], self.train_ranks(4, values)["state_sha256"])
            # Two of the three ranks that rank 0 sends to are on the other host.
            self.assertGreater(sent, sum(step["reduced_bytes"] for step in hosts["steps"]) / 2, "all of it went elsewhere")

    def test_hosts_share_the_path_of_a_durable_store(self):
        values = {"sharding.stage": 3, "optimizer.schedule_steps": 6, **ON_NVME}
        expected = self.train_ranks(4, {**values, "run.steps": 6})["state_sha256"]
        store = {**values, "storage.state.name": "run-7"}
        first, _ = self.train_on_hosts(4, {**store, "run.steps": 3}, "--resume")
        self.assertEqual(first["resumed_steps"], 0)
        second, _ = self.train_on_hosts(4, {**store, "run.steps": 6}, "--resume=required")
        self.assertEqual((second["resumed_steps"], second["state_sha256"]), (3, expected))
        config = self.write_config(store)
        self.assertRegex(self.run_sluice("state", "list", config).stdout, r"step 6  4 ranks\n$")
        self.run_sluice("state", "remove", config)
        os.remove(self.path("storage", "run-7.lock"))

    def test_node_is_the_ranks_of_a_host(self):
        values = {"precision.parameters": "fp32", **ON_NVME}
        hosts, sent = self.train_on_hosts(4, {"sharding.group": "node", **values})
        self.assertEqual(hosts["state_sha256"], self.train_ranks(4, {"sharding.group": 2, **values})["state_sha256"])
        _, sent_without = self.train_on_hosts(4, values)
        self.assertLess(sent, sent_without, "groups leave less for the link between hosts")
