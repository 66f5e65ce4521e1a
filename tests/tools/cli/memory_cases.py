"""The peak of resident memory stays within the pools that the start table lists, the activations,
and 64 MiB for the program itself."""

from cli_support import ON_NVME, SANITIZE, SMALL_CONFIG, CliCase, with_values

PROGRAM_BYTES = 64 << 20

# 218 MiB of state: a forgotten copy of its moments would show.
LARGE = with_values(SMALL_CONFIG, {
    "model.layers": 6, "model.heads": 8, "model.embedding": 512, "run.steps": 1,
    "storage.block_elements": 262144, **ON_NVME})


class PeakMemory(CliCase):
    def setUp(self):
        super().setUp()
        if SANITIZE:
            self.skipTest("a sanitizer's shadow memory counts as resident")

    def check_peak(self, run):
        pools = run["device_pool_bytes"] + run["host_pool_bytes"]
        self.assertLessEqual(run["peak_rss_bytes"],
                             pools + run["activation_bytes"] + PROGRAM_BYTES)

    def budgets(self):
        device = self.smallest_budget("memory.device", {}, base=LARGE)
        host = self.smallest_budget("memory.host", {}, base=LARGE)
        return {"memory.device": device, "memory.host": host}

    def test_state_larger_than_memory(self):
        run = self.train(self.budgets(), "--save", "model", base=LARGE)
        self.assertGreater(run["state_bytes"],
                           2 * (run["device_pool_bytes"] + run["host_pool_bytes"]))
        self.check_peak(run)
        self.assertGreater(run["peak_rss_bytes"], run["device_pool_bytes"] + run["host_pool_bytes"])
        again = self.train(self.budgets(), "--init", "model", base=LARGE)
        self.check_peak(again)

    def test_text_larger_than_memory(self):
        with open(self.path("text.txt"), "r+b") as file:
            file.truncate(200 << 20)  # zeros, which are tokens too
        self.check_peak(self.train({"run.steps": 20}))

    def test_the_program_before_does_not_count(self):
        # A child's maximum begins at the resident memory of the process that started it.
        ballast = bytearray(b"x" * (300 << 20))
        self.check_peak(self.train())
        del ballast
