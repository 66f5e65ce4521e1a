// The output of `sluice top` about status pages.
#include "tools/report/status_text.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace sluice {
namespace {

TEST(StatusText, SaysWhatIsGoneOrWrong) {
  FoundPage gone;
  gone.name = "12";
  gone.status = RunStatus{};
  gone.status->step = 4;
  gone.status->steps = 9;
  FoundPage wrong;
  wrong.name = "13";
  wrong.problem = "is torn";
  const std::vector<FoundPage> pages{gone, wrong};
  EXPECT_EQ(status_view(pages, 0),
            "process 12 is gone: killed or crashed behind step 4 of 9\npage 13: is torn\n");
}

DriveStatus drive_of(std::string_view path, std::uint64_t read_bytes, std::uint64_t write_bytes) {
  DriveStatus drive{};
  std::ranges::copy(path, drive.path.begin());
  drive.read_bytes = read_bytes;
  drive.write_bytes = write_bytes;
  return drive;
}

// Step 4 of a run over two ranks and two drives, of half a second.
std::vector<FoundPage> two_drives() {
  FoundPage page;
  page.name = "12";
  page.is_alive = true;
  page.status = RunStatus{};
  RunStatus& status = *page.status;
  status.pid = 12;
  status.ranks = 2;
  status.phase = RunPhase::kTraining;
  status.step = 4;
  status.loss = std::numeric_limits<double>::quiet_NaN();
  status.step_s = 0.5;
  status.links[0].size_bytes = 3'000'000'000;
  status.links[1].size_bytes = 1'000'000'000;
  status.gathered_bytes = 500'000'000;
  status.drive_count = 2;
  status.drives[0] = drive_of("/first", 1'000'000'000, 0);
  status.drives[1] = drive_of("/sec\"ond", 2'000'000'000, 1'000'000'000);
  return {page};
}

TEST(StatusText, PrometheusGetsUtf8) {
  std::vector<FoundPage> pages = two_drives();
  pages[0].status->drives[0] = drive_of("/dr\xe4ive", 1, 0);
  EXPECT_NE(status_prometheus(pages, 0).find("drive=\"/dr\xef\xbf\xbdive\","), std::string::npos);
}

TEST(StatusText, HasEachDrivesRate) {
  const std::string text = status_view(two_drives(), 0);
  EXPECT_NE(text.find("  storage: read 2.79 GiB, 6.00 GB/s; written 954 MiB, 2.00 GB/s\n"
                      "    /first: read 954 MiB, 2.00 GB/s; written 0 B, 0.00 GB/s\n"
                      "    /sec\"ond: read 1.86 GiB, 4.00 GB/s; written 954 MiB, 2.00 GB/s\n"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("  ranks: gathered 477 MiB, 1.00 GB/s; reduced 0 B, 0.00 GB/s\n"),
            std::string::npos)
      << text;
  const std::string metrics = status_prometheus(two_drives(), 0);
  EXPECT_NE(metrics.find("sluice_drive_bytes{pid=\"12\",rank=\"0\",drive=\"/sec\\\"ond\","
                         "direction=\"read\"} 2000000000\n"),
            std::string::npos)
      << metrics;
  const auto json = nlohmann::json::parse(status_json(two_drives(), 0));
  EXPECT_EQ(json["runs"][0]["drives"][1]["read_bytes_per_s"], 4e9);
  EXPECT_EQ(json["runs"][0]["gathered_bytes_per_s"], 1e9);
}

TEST(StatusText, LeavesOutWhatIsNotKnown) {
  std::vector<FoundPage> pages = two_drives();
  const std::string text = status_view(pages, 0);
  EXPECT_NE(text.find("process 12, rank 0 of 2: training, step 4, 0.0 s ago\n  norm 0.000  0.500 s "
                      "per step\n"),
            std::string::npos)
      << text;
  EXPECT_EQ(status_prometheus(pages, 0).find("tokens_per_second{"), std::string::npos);
  const auto run = nlohmann::json::parse(status_json(pages, 0))["runs"][0];
  for (const char* key : {"steps", "loss", "tokens", "tokens_per_s", "flops_per_s", "mfu"})
    EXPECT_TRUE(run[key].is_null()) << key;
  pages[0].is_alive = false;
  EXPECT_EQ(status_view(pages, 0), "process 12 is gone: killed or crashed behind step 4\n");
}

TEST(StatusText, APathNeedNotBeUtf8) {
  std::vector<FoundPage> pages = two_drives();
  pages[0].status->drives[0] = drive_of("/\xff", 1, 1);
  const auto run = nlohmann::json::parse(status_json(pages, 0))["runs"][0];
  EXPECT_EQ(run["drives"][0]["path"], "/\xef\xbf\xbd");
}

}  // namespace
}  // namespace sluice
