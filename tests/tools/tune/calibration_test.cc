#include "tools/tune/calibration.h"

#include <algorithm>
#include <cmath>
#include <fstream>

#include <gtest/gtest.h>

#include "tests/support/temp_directory.h"

namespace sluice {
namespace {

// 1 GB/s with requests of 1 MiB and 4 GB/s with 16 MiB, twice of it at depth 4; writes half.
MachineCalibration made() {
  MachineCalibration machine{.hardware = "a test", .made_s = 1000, .took_s = 2};
  for (const IoPattern pattern : {IoPattern::kRead, IoPattern::kWrite, IoPattern::kMixed}) {
    for (const std::uint64_t size : {1u << 20, 16u << 20}) {
      for (const std::uint32_t depth : {1u, 4u})
        machine.drives.push_back(
            {.pattern = pattern,
             .request_bytes = size,
             .depth = depth,
             .bytes_per_second = (size > 1 << 20 ? 4e9 : 1e9) * (depth == 4 ? 2 : 1) *
                                 (pattern == IoPattern::kWrite ? 0.5 : 1)});
    }
  }
  machine.adam_parameters_per_second = 1e9;
  return machine;
}

// Without the factor of reading and writing at once: the ratio to the smallest request.
double read_rate(std::uint64_t request_bytes, std::uint32_t depth) {
  Rates rates, first;
  made().set_storage_rates_for(request_bytes, depth, rates);
  made().set_storage_rates_for(1 << 20, 1, first);
  return rates.read_bytes_per_second / first.read_bytes_per_second;
}

TEST(Calibration, RatesLieBetweenTheMeasuredOnes) {
  EXPECT_NEAR(read_rate(1 << 20, 1), 1, 1e-9);
  EXPECT_NEAR(read_rate(16 << 20, 1), 4, 1e-9);
  EXPECT_NEAR(read_rate(4 << 20, 1), 2, 1e-9);  // half of the way by logarithm
  EXPECT_NEAR(read_rate(4 << 20, 2), 2 * std::sqrt(2), 1e-9);
  EXPECT_NEAR(read_rate(16 << 20, 4), 8, 1e-9);
  EXPECT_NEAR(read_rate(4096, 1), 1, 1e-9);  // beyond the measured ones, the nearest
  EXPECT_NEAR(read_rate(1 << 30, 64), 8, 1e-9);
}

TEST(Calibration, ReadingAndWritingAtOnceTakesTheMeasuredTime) {
  Rates rates;
  made().set_storage_rates_for(1 << 20, 1, rates);
  // Reads 1, writes 0.5 and both in turns 1 GB/s: 2 s for what takes 3 s one after the other. That
  // is the time of the write alone, so the drive keeps both rates.
  EXPECT_EQ(rates.duplex, Duplex::kFull);
  EXPECT_NEAR(rates.write_bytes_per_second / rates.read_bytes_per_second, 0.5, 1e-9);
  EXPECT_NEAR(rates.read_bytes_per_second, 1e9, 1);
}

// A read of 1 MiB has 1 GB/s alone, and 8 GB/s where many large ones are in flight. A queue of
// depth 1 has all of the latency in its rate.
TEST(Calibration, LatencyIsThatOfASmallReadAlone) {
  for (const std::uint64_t request_bytes : {1 << 20, 16 << 20}) {
    Rates rates;
    made().set_storage_rates_for(request_bytes, 4, rates);
    EXPECT_NEAR(rates.latency_s, 0.75 * (1 << 20) * (1 / 1e9 - 1 / 8e9), 1e-12);
    made().set_storage_rates_for(request_bytes, 1, rates);
    EXPECT_EQ(rates.latency_s, 0);
  }
}

TEST(Calibration, AFileHoldsAllOfIt) {
  const test::TempDirectory folder;
  const std::string path = folder.path() + "/deep/calibration.json";
  EXPECT_EQ(save_calibration(path, made()), "");
  std::string why;
  const auto loaded = load_calibration(path, "a test", 1, why);
  ASSERT_TRUE(loaded) << why;
  EXPECT_EQ(loaded->made_s, 1000);
  EXPECT_EQ(loaded->adam_parameters_per_second, 1e9);
  Rates before, after;
  made().set_storage_rates_for(3 << 20, 3, before);
  loaded->set_storage_rates_for(3 << 20, 3, after);
  EXPECT_EQ(before.read_bytes_per_second, after.read_bytes_per_second);
  EXPECT_EQ(before.write_bytes_per_second, after.write_bytes_per_second);
}

TEST(Calibration, OtherHardwareAndDamageAreNamed) {
  const test::TempDirectory folder;
  const std::string path = folder.path() + "/calibration.json";
  std::string why;
  EXPECT_FALSE(load_calibration(path, "a test", 1, why));
  EXPECT_EQ(why, "");  // none is at hand
  ASSERT_EQ(save_calibration(path, made()), "");
  EXPECT_FALSE(load_calibration(path, "another machine", 1, why));
  EXPECT_NE(why.find("other hardware: a test; here: another machine"), std::string::npos) << why;
  MachineCalibration part = made();
  part.drives.pop_back();
  ASSERT_EQ(save_calibration(path, part), "");
  why.clear();
  EXPECT_FALSE(load_calibration(path, "a test", 1, why));
  EXPECT_NE(why.find("is no calibration"), std::string::npos) << why;
  std::ofstream(path) << "{";
  why.clear();
  EXPECT_FALSE(load_calibration(path, "a test", 1, why));
  EXPECT_NE(why.find("is no calibration"), std::string::npos) << why;
}

TEST(Calibration, WhatNobodyMeasuredIsNotTaken) {
  const test::TempDirectory folder;
  const std::string path = folder.path() + "/calibration.json";
  const auto refusal = [&](std::size_t paths, const auto& change) {
    MachineCalibration machine = made();
    change(machine);
    EXPECT_EQ(save_calibration(path, machine), "");
    std::string why;
    EXPECT_FALSE(load_calibration(path, "a test", paths, why));
    return why.substr(std::min(why.size(), path.size() + 3));
  };
  EXPECT_EQ(refusal(1, [](MachineCalibration& machine) { machine.made_s = 1'000'000'000'000; }),
            "was measured later than now, by this machine's clock");
  EXPECT_EQ(refusal(3,
                    [](MachineCalibration& machine) {
                      machine.path_rates = {1e9, 1e9};
                    }),
            "has the rates of 2 paths, where 3 are expected");
  const std::string none = "is no calibration of sluice tune";
  EXPECT_EQ(refusal(1, [](auto& machine) { machine.adam_parameters_per_second = 1e308; }), none);
  EXPECT_EQ(refusal(1, [](auto& machine) { machine.drives[0].bytes_per_second = 1e308; }), none);
  EXPECT_EQ(refusal(2, [](auto& machine) { machine.path_rates = {1e9, -1}; }), none);
}

TEST(Calibration, HardwareNamesDrivesAndCores) {
  const test::TempDirectory folder;
  const CalibrationRequest request{.paths = {folder.path()}, .format = {}};
  const std::string hardware = hardware_of(request);
  EXPECT_NE(hardware.find("drive 0x"), std::string::npos);
  EXPECT_NE(hardware.find("cores"), std::string::npos);
  CalibrationRequest one = request;
  one.threads = 1;
  CalibrationRequest two = request;
  two.threads = 2;
  EXPECT_NE(hardware_of(one), hardware_of(two));
  EXPECT_NE(calibration_file(hardware_of(one)), calibration_file(hardware_of(two)));
}

}  // namespace
}  // namespace sluice
