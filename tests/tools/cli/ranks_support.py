"""The common part of tests of `sluice train` on several ranks: a real mpirun, where there is one."""

import os
import shutil

from cli_support import BINARY, CliCase

PLUGIN = os.path.join(os.path.dirname(BINARY), "..", "lib", "sluice", "libsluice_mpi.so")


class RanksTest(CliCase):
    LABEL = "mpi"

    def setUp(self):
        super().setUp()
        if shutil.which("mpirun") is None or not os.path.exists(PLUGIN):
            self.skipTest("this build or this machine has no MPI")

    def environment(self):
        return dict(super().environment(), OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                    OMPI_MCA_rmaps_base_oversubscribe="1", OMPI_MCA_hwloc_base_binding_policy="none",
                    OMPI_MCA_btl_vader_single_copy_mechanism="none")

    def mpirun(self, ranks):
        return ("timeout", "-k", "5", "100", "mpirun", "-n", str(ranks))

    def train_ranks(self, ranks, values=None, *arguments):
        """Gathers every unit at every use, small ones too, unless `values` say otherwise."""
        values = {"run.threads": 1, "sharding.keep_gathered": "0", **(values or {})}
        self.run_sluice("train", self.write_config(values), "--quiet", "--json", "run.json", *arguments,
                        prefix=self.mpirun(ranks))
        return self.read_json("run.json")
