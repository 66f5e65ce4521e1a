// The rates of storage that follow from reading alone, writing alone, and both at once.
#include "tools/report/plan_rates.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/temp_directory.h"

namespace sluice {
namespace {

// Seconds for a byte read and a byte written at the same time, in the model of the bounds.
double both_s(const Rates& rates) {
  const double read_s = 1 / rates.read_bytes_per_second, write_s = 1 / rates.write_bytes_per_second;
  return rates.duplex == Duplex::kHalf ? read_s + write_s : std::max(read_s, write_s);
}

TEST(StorageRates, BothAtOnceTakeTheMeasuredTime) {
  for (const double read : {7e9, 3e9})
    for (const double write : {7e9, 4e9, 2e9, 5e8})
      for (double interference = 0.5; interference <= 1.2; interference += 0.05) {
        Rates rates;
        set_storage_rates(read, write, interference, rates);
        const double expected_s =
            std::max(interference * (1 / read + 1 / write), 1 / std::min(read, write));
        EXPECT_NEAR(both_s(rates) / expected_s, 1, 1e-9) << read << " " << write;
      }
}

// A drive that reads and writes side by side keeps the rates that it has alone, also where one of
// them is slow.
TEST(StorageRates, ADriveOfFullDuplexKeepsItsRates) {
  for (const double write : {7e9, 4e9, 2e9}) {
    constexpr double kRead = 7e9;
    const double sum_s = 1 / kRead + 1 / write;
    Rates rates;
    set_storage_rates(kRead, write, 1 / write / sum_s, rates);
    EXPECT_EQ(rates.duplex, Duplex::kFull) << write;
    EXPECT_NEAR(rates.read_bytes_per_second / kRead, 1, 1e-9) << write;
    EXPECT_NEAR(rates.write_bytes_per_second / write, 1, 1e-9) << write;
    set_storage_rates(kRead, write, 1, rates);
    EXPECT_EQ(rates.duplex, Duplex::kHalf) << write;
    EXPECT_NEAR(rates.read_bytes_per_second / kRead, 1, 1e-9) << write;
  }
}

// A run on a part of the drives of a calibration has the rates of these drives, and shares them
// with the other ranks of its host.
TEST(StorageRates, AreThoseOfTheDrivesOfTheRun) {
  const test::TempDirectory directory;
  const std::string file = directory.path() + "/io.json";
  std::ofstream(file) << R"({"best": {"read": {"bytes_per_second": 300e6},
                                      "write": {"bytes_per_second": 300e6}},
                             "interference": 1.0,
                             "drives": [{"path": "/x/a", "read": 100e6, "write": 90e6},
                                        {"path": "/x/b", "read": 250e6, "write": 240e6},
                                        {"path": "/x/c", "read": 50e6}]})";
  const auto rates = [&](std::vector<std::string> paths, std::uint32_t ranks = 1) {
    PlanRateOptions options;
    options.io_file = file;
    options.io_paths = std::move(paths);
    options.sharing_ranks = ranks;
    const Rates of = plan_rates(options, {}).rates;
    return std::pair(std::round(of.read_bytes_per_second), std::round(of.write_bytes_per_second));
  };
  const std::pair all(300e6, 300e6);
  EXPECT_EQ(rates({}), all);
  EXPECT_EQ(rates({"/x/a/"}), std::pair(100e6, 90e6));
  EXPECT_EQ(rates({"/x/../x/a"}, 2), std::pair(50e6, 45e6));
  EXPECT_EQ(rates({"/x/a", "/x/b"}), all);  // no more than all together
  EXPECT_EQ(rates({"/x/c"}), all);          // not measured
  EXPECT_EQ(rates({"/x/a", "/x/d"}), all);
}

}  // namespace
}  // namespace sluice
